"""The pods of a job, sorted once: the current attempt's gang, and what is left of older ones.

A status names members by a short text: "worker 0-3,7 ps 1".
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from disttrain_api.names import Reason, Role
from disttrain_api.scheduling import GangScheduler
from disttrain_api.spec import JobSpec
from disttrain_api.status import JobStatus
from disttrain_operator.decide.observed import Observed, PodFacts

Identity = tuple[Role, int]

_OF_ROLE = re.compile(f"({'|'.join(Role)}) ([0-9,-]+)")
_RANGE = re.compile("([0-9]{1,9})(?:-([0-9]{1,9}))?")


def members_as_text(members: Iterable[Identity]) -> str | None:
    """Return the members as ranges of indices, role by role; None: there are none."""
    known = set(members)
    texts = (f"{role} {_ranges(sorted(index for of, index in known if of is role))}" for role in Role)
    return " ".join(text for text in texts if not text.endswith(" ")) or None


def members_of_text(text: str | None, replicas: Mapping[Role, int]) -> frozenset[Identity]:
    """Return the members that a text names. What it holds besides is ignored. replicas: how many a role has."""
    found: set[Identity] = set()
    begins = dict.fromkeys(Role, 0)
    for name, ranges in _OF_ROLE.findall(text or ""):
        role = Role(name)
        for match in filter(None, map(_RANGE.fullmatch, ranges.split(","))):
            # The ranges ascend: so no text has more read from it than there are members.
            first, last = max(begins[role], int(match[1])), min(int(match[2] or match[1]), replicas[role] - 1)
            found.update((role, index) for index in range(first, last + 1))
            begins[role] = max(begins[role], last + 1) if first <= last else begins[role]
    return frozenset(found)


def _ranges(indices: list[int]) -> str:
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


# Why a pod that names a queue waits.
QUEUES = frozenset({Reason.QUEUED, Reason.QUEUE_NOT_SERVED})


def replicas(spec: JobSpec, role: Role) -> int:
    """Pods of a role."""
    if role is Role.WORKER:
        return spec.workers.replicas
    return spec.parameter_servers.replicas if spec.parameter_servers is not None else 0


def expected(spec: JobSpec) -> Iterator[Identity]:
    """Role and index of every pod of a gang."""
    for role in (Role.WORKER, Role.PS):
        yield from ((role, index) for index in range(replicas(spec, role)))


def noted_successes(spec: JobSpec, status: JobStatus) -> frozenset[Identity]:
    """Members of the newest attempt that have succeeded, as the status says."""
    text = status.attempts[-1].succeeded if status.attempts else None
    return members_of_text(text, {role: replicas(spec, role) for role in Role})


@dataclass(frozen=True)
class Gang:
    """The pods of a status's newest attempt, and of older ones."""

    spec: JobSpec
    status: JobStatus
    observed: Observed

    @property
    def attempt(self) -> int:
        return self.status.attempt

    @cached_property
    def members(self) -> tuple[Identity, ...]:
        """Role and index of every pod of the gang."""
        return tuple(expected(self.spec))

    @cached_property
    def _replaced_uids(self) -> frozenset[str]:
        attempts = self.status.attempts
        return frozenset(entry.uid for entry in attempts[-1].replacements) if attempts else frozenset()

    @cached_property
    def pods(self) -> tuple[PodFacts, ...]:
        """Pods of the attempt that exist and count."""
        return tuple(pod for pod in self.seen if not pod.gone and not pod.kept_by_finalizer)

    @cached_property
    def seen(self) -> tuple[PodFacts, ...]:
        """Pods of the attempt that exist or were deleted a short while ago, without those that were replaced."""
        return tuple(
            pod for pod in self.observed.pods if pod.attempt == self.attempt and pod.uid not in self._replaced_uids
        )

    @cached_property
    def replaced(self) -> tuple[PodFacts, ...]:
        """Pods of the attempt that are to make room for their replacement, and still exist."""
        return tuple(pod for pod in self.observed.pods if pod.uid in self._replaced_uids and not pod.gone)

    @cached_property
    def old(self) -> tuple[PodFacts, ...]:
        """Existing pods of other attempts."""
        return tuple(pod for pod in self.observed.pods if pod.attempt != self.attempt and not pod.gone)

    @cached_property
    def missing(self) -> tuple[Identity, ...]:
        """Members that neither exist nor have done their work."""
        there = {(pod.role, pod.index) for pod in self.pods} | self.succeeded
        return tuple(identity for identity in self.members if identity not in there)

    @cached_property
    def lost_before_running(self) -> tuple[Identity, ...]:
        """Members that cannot be made again under their names although the gang has not run: a finalizer holds them, or
        a queue has admitted their group, to which no pod may be added."""
        if self.status.attempts[-1].admitted_time is not None:
            return self.missing
        kept = {(pod.role, pod.index) for pod in self.seen if pod.kept_by_finalizer}
        return tuple(identity for identity in self.missing if identity in kept)

    @cached_property
    def queued(self) -> bool:
        """Return whether a queue holds it back, as opposed to a refused child or a queue that is not served."""
        in_queue = self.spec.run_policy.scheduling_policy.gang_scheduler is GangScheduler.KUEUE
        admitted = self.status.attempts[-1].admitted_time is not None or self.let_go
        unserved = any(pod.waiting is not None and pod.waiting.reason == Reason.QUEUE_NOT_SERVED for pod in self.pods)
        return in_queue and not admitted and not unserved and not self.observed.problems

    @cached_property
    def let_go(self) -> bool:
        """Whether a queue has let its pods go to nodes: it does so with all or none."""
        in_queue = self.spec.run_policy.scheduling_policy.gang_scheduler is GangScheduler.KUEUE
        return in_queue and any(
            pod.program_started or pod.waiting is None or pod.waiting.reason not in QUEUES for pod in self.seen
        )

    @property
    def released_at(self) -> datetime | None:
        """When the gate let its first pod go."""
        return min((pod.released_at for pod in self.pods if pod.released_at is not None), default=None)

    @cached_property
    def succeeded(self) -> frozenset[Identity]:
        """Members that ended with exit code 0. What the status says of them holds, whatever became of their pods."""
        seen = {(pod.role, pod.index) for pod in self.seen if pod.program_succeeded}
        return noted_successes(self.spec, self.status) | seen

    @cached_property
    def failed(self) -> tuple[PodFacts, ...]:
        """Pods that ended otherwise, also those deleted a short while ago, and those whose node is lost.

        If a member has had several lives, only the last counts.
        """
        alive = {(pod.role, pod.index) for pod in self.pods if pod.exit is None and not pod.on_lost_node}
        done = alive | self.succeeded
        return tuple(
            pod for pod in self.seen if (pod.program_failed or pod.on_lost_node) and (pod.role, pod.index) not in done
        )

    @cached_property
    def unstarted(self) -> tuple[PodFacts, ...]:
        """Existing pods whose trainer container does not run yet."""
        return tuple(pod for pod in self.pods if not pod.program_started)

    @cached_property
    def awaiting_address(self) -> tuple[PodFacts, ...]:
        """Existing pods whose container runs, and whose agent has not started its ranks."""
        return tuple(pod for pod in self.pods if pod.awaits_address is not None)

    @property
    def all_started(self) -> bool:
        """Whether the containers of all members run or have run: nothing of the cluster keeps one from starting."""
        return not self.missing and not self.unstarted

    @property
    def all_run(self) -> bool:
        """Whether all of them have started, and their agents the ranks."""
        return self.all_started and not self.awaiting_address
