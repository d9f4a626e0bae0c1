"""The failures of a gang, and which of them decides. Every failure counts unless the failure policy ignores it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property

from disttrain_api.names import Role
from disttrain_api.run_policy import FailureAction
from disttrain_api.status import Replacement
from disttrain_operator.decide.attempt_history import ran
from disttrain_operator.decide.cause import Cause, cause_of, node_is_lost, pod_is_silent
from disttrain_operator.decide.clock import after
from disttrain_operator.decide.dead_nodes import hears_most, is_unreachable
from disttrain_operator.decide.failure_policy import MatchedAction, gang_action, match_failure_policy
from disttrain_operator.decide.gang import Gang, Identity
from disttrain_operator.decide.gang_actions import forced_at
from disttrain_operator.decide.missed import missed
from disttrain_operator.decide.observed import PodFacts, ReadableJob
from disttrain_operator.decide.replaceable import is_lost_again, replaceable, waits_for_lost_pods
from disttrain_operator.plan.identity import pod_name

# A peer's exit may arrive before the victim's: wait this long for more exits before naming the cause.
COLLECT_SECONDS = 3
# All that failed lost a peer that has not failed: it hangs, or its node is dead, which Kubernetes notices after most of
# a minute. Nothing is lost by waiting: while it may live, no next attempt begins.
PEER_SECONDS = 90

# A pod that is made again alone has lost what it held; peers notice when it is back, at the latest when torch gives up.
MISSED_SECONDS = 1800

_ALONE = MatchedAction(FailureAction.RESTART_POD)
_OF_ONE_POD = frozenset({FailureAction.RESTART_POD, FailureAction.IGNORE})


@dataclass(frozen=True)
class Failures:
    """The failed members of a gang, with what the failure policy says of each."""

    job: ReadableJob
    gang: Gang
    now: datetime

    @cached_property
    def all(self) -> tuple[tuple[Cause, MatchedAction], ...]:
        """Every failed member."""
        causes = [
            self._explained(cause_of(pod)) for pod in (*self.gang.failed, *self._stuck_terminating(), *self._lost())
        ]
        known = {cause.pod.uid for cause in causes}
        if causes and all(cause.symptom for cause in causes):
            silent = [pod for pod in self.gang.pods if self._is_silent(pod)]
        else:
            silent = [pod for pod in self._awaited() if self._is_silent(pod) and pod.uid not in known]
        causes += map(node_is_lost, silent)
        known |= {pod.uid for pod in silent}
        causes += [pod_is_silent(pod) for pod in self._unanswering() if pod.uid not in known]
        found = [(cause, match_failure_policy(self.gang.spec.run_policy, cause)) for cause in causes]
        alone = replaceable(self.gang, found)
        return tuple((cause, _ALONE if cause.pod.name in alone else matched) for cause, matched in found)

    @cached_property
    def ignored(self) -> frozenset[Identity]:
        """Members that failed and whose failure is ignored."""
        return frozenset(
            (cause.pod.role, cause.pod.index) for cause, matched in self.all if matched.action is FailureAction.IGNORE
        )

    @cached_property
    def of_the_gang(self) -> tuple[Cause, MatchedAction] | None:
        """The first cause among the failures that concern all."""
        found = [(cause, matched) for cause, matched in self.all if matched.action not in _OF_ONE_POD]
        first = min(found, key=lambda entry: entry[0].rank, default=None)
        if first is None or not first[0].symptom:
            return first
        # The peer that was lost may be one that alone would be made again.
        known = [cause for cause, _ in self.of_single_pods if not cause.symptom]
        cause = min(known, key=lambda cause: cause.rank, default=None)
        return first if cause is None else (cause, gang_action(first[1], cause))

    @cached_property
    def of_single_pods(self) -> tuple[tuple[Cause, MatchedAction], ...]:
        """Failures after which one pod is made again."""
        return tuple((cause, matched) for cause, matched in self.all if matched.action is FailureAction.RESTART_POD)

    @property
    def settled_at(self) -> datetime | None:
        """When the first cause may be named; None: now."""
        counted = [cause for cause, matched in self.all if matched.action is not FailureAction.IGNORE]
        if any(cause.certain for cause in counted) or not any(pod.program_alive for pod in self.gang.pods):
            return None
        ends = [cause.pod.exit.finished_at for cause in counted if cause.pod.exit is not None]
        first = min((end for end in ends if end is not None), default=None)
        symptoms = all(cause.symptom for cause in counted)
        window = timedelta(seconds=PEER_SECONDS if symptoms else COLLECT_SECONDS)
        # A node's clock that is far ahead must not hold the restart back.
        if first is None or not self.now - window < first < self.now + window:
            return None
        return first + window

    def _explained(self, cause: Cause) -> Cause:
        """The cause with the pod that it follows from."""
        end = cause.pod.exit.finished_at if cause.pod.exit else None
        if not cause.symptom or end is None:
            return cause
        for entry in reversed(self.gang.status.attempts[-1].replacements):
            if entry.pod != cause.pod.name and self._missed(entry, end):
                return replace(cause, follows=entry)
        return cause

    def _missed(self, entry: Replacement, end: datetime) -> bool:
        """Whether what the replaced pod held may be what ended a peer then: it does not run again, or not for long."""
        again = next((pod for pod in self.gang.pods if pod.name == entry.pod), None)
        if again is not None and not again.program_started:
            return True
        if waits_for_lost_pods(self.gang.spec):
            # All ranks begin anew with it, and miss nothing.
            return again is None or again.awaits_address is not None
        since = after(entry.time, 0)
        if again is not None and again.runs_since is not None:
            since = max(since, again.runs_since)
        return end < since + timedelta(seconds=MISSED_SECONDS)

    def _awaited(self) -> Iterator[PodFacts]:
        """Pods that the others have lost and wait for. Kubernetes takes minutes to say so of one on a dead node."""
        live = self.gang.observed.live
        if live is not None and live.attempt == self.gang.attempt:
            missed = live.awaited | live.missing
            yield from (pod for pod in self.gang.pods if pod.role is Role.WORKER and pod.index in missed)

    def _is_silent(self, pod: PodFacts) -> bool:
        """Whether nothing is heard of the pod's node, by its kubelet or at the pod's address."""
        return pod.cut_off or is_unreachable(pod, self.gang)

    def _unanswering(self) -> Iterator[PodFacts]:
        """Pods that the others miss, whose agents do not answer though their nodes live."""
        observed = self.gang.observed
        for pod in missed(self.gang.pods, observed.live):
            if hears_most(self.gang) and pod.uid in observed.silent and not pod.cut_off:
                yield pod

    def _stuck_terminating(self) -> Iterator[PodFacts]:
        """Pods that somebody deleted and that do not end."""
        for pod in self.gang.pods:
            force_at = forced_at(pod, self.gang.spec.run_policy)
            if pod.exit is None and not pod.on_lost_node and force_at is not None and self.now >= force_at:
                yield pod

    def _lost(self) -> Iterator[PodFacts]:
        """Members that ran and of which nothing is left, or only that they were being ended; and those that did not run
        and cannot be made again."""
        lost = self.gang.missing if ran(self.gang.status) else self.gang.lost_before_running
        failed = {(pod.role, pod.index) for pod in self.gang.failed}
        last = {(pod.role, pod.index): pod for pod in self.gang.seen if pod.gone or pod.kept_by_finalizer}
        being_replaced = self._being_replaced()
        for role, index in lost:
            if (role, index) in failed or (role, index) in being_replaced:
                continue
            nothing = PodFacts(
                name=self._name((role, index)), uid="", role=role, index=index, attempt=self.gang.attempt, gone=True
            )
            yield last.get((role, index), nothing)

    def _being_replaced(self) -> set[Identity]:
        """Members that are about to be made again alone."""
        gang, status = self.gang, self.gang.status
        replaced = {entry.pod for entry in status.attempts[-1].replacements}
        former = {(pod.role, pod.index) for pod in gang.replaced}
        known = {(pod.role, pod.index) for pod in gang.seen}
        return {
            identity
            for identity in gang.missing
            if identity not in known
            and (name := self._name(identity)) in replaced
            # Else the new pod has come, and is lost, too.
            and (identity in former or not is_lost_again(status, name))
        }

    def _name(self, identity: Identity) -> str:
        return pod_name(self.job.name, self.job.uid, *identity, self.gang.attempt)
