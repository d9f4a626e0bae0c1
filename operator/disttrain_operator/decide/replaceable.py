"""Lost pods of a job with `restartStrategy: InPlace` that are made again alone, while all ranks wait for them.

Ranks that fail restart in their pods, and where that cannot be the gang is made again. This is between the two. There
must be an agent left that holds its pod and knows the generation of its ranks, and a reason to expect that a new pod
does better.
"""

from collections.abc import Iterable

from disttrain_api.names import Role
from disttrain_api.run_policy import FailureAction, RestartStrategy
from disttrain_api.scheduling import GangScheduler
from disttrain_api.spec import JobSpec
from disttrain_api.status import FailureClass, JobStatus
from disttrain_operator.decide.attempt_history import (
    has_gone_on,
    last_known_step,
    last_step_time,
    pending_verdict,
    ran,
)
from disttrain_operator.decide.cause import Cause
from disttrain_operator.decide.failure_policy import MatchedAction, is_counted
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.observed import PodFacts

MOST = 16
"""Pods without a new checkpoint between them. If more are lost, the gang is."""
_OF_THE_CLUSTER = frozenset({FailureClass.POD_LOST, FailureClass.DISRUPTION, FailureClass.NODE_LOST})
# The agent died with its ranks, unless it reports a failure: then it has decided that no rank starts again.
_OF_A_WHOLE_POD = frozenset({FailureClass.KILLED, FailureClass.OUT_OF_MEMORY, FailureClass.OUT_OF_STORAGE})


def waits_for_lost_pods(spec: JobSpec) -> bool:
    """Return whether the agents of a job hold its ranks until a lost pod is made again."""
    # An ended pod of a group that Kueue has admitted keeps its name until all have ended.
    in_queue = spec.run_policy.scheduling_policy.gang_scheduler is GangScheduler.KUEUE
    return spec.run_policy.restart_strategy is RestartStrategy.IN_PLACE and not in_queue


def is_lost_again(status: JobStatus, pod: str) -> bool:
    """Return whether the pod of this name, if it is not there, has come back since it was made again alone."""
    entries = [entry for entry in status.attempts[-1].replacements if entry.pod == pod]
    return bool(entries) and has_gone_on(entries[-1], last_step_time(status))


def replaceable(gang: Gang, failures: Iterable[tuple[Cause, MatchedAction]]) -> frozenset[str]:
    """Return the names of the pods, of those that failed so, that are made again alone."""
    if not waits_for_lost_pods(gang.spec) or not ran(gang.status) or pending_verdict(gang.status) is not None:
        return frozenset()
    entries, step = gang.status.attempts[-1].replacements, last_known_step(gang.status)
    since = [entry for entry in entries if entry.checkpoint_step == step]
    before = {entry.pod for entry in since if not is_lost_again(gang.status, entry.pod)}
    found = [cause for cause, matched in failures if _is_lost(cause, matched) and cause.pod.name not in before]
    if not any(map(_holds, gang.pods)):
        return frozenset()
    # Pods have a budget of their own: where it is used up, the gang's begins.
    counted = sum(entry.counted for entry in since) + sum(map(is_counted, found))
    too_many = len(since) + len(found) > MOST or counted > gang.spec.run_policy.max_restarts
    return frozenset() if too_many else frozenset(cause.pod.name for cause in found)


def _holds(pod: PodFacts) -> bool:
    """Whether its ranks have trained in this attempt, and nothing is about to end it. A replacement that waits knows of
    no generation."""
    return pod.role is Role.WORKER and pod.undisturbed and pod.awaits_address is None


def _is_lost(cause: Cause, matched: MatchedAction) -> bool:
    """Whether it failed as a whole, by nothing that its agent has judged, and no rule of the job says what follows."""
    restarts = (FailureAction.RESTART_GANG, FailureAction.RESTART_WITHOUT_COUNTING)
    if matched.rule is not None or matched.action not in restarts:
        return False
    if cause.class_ in _OF_THE_CLUSTER:
        return True
    report = cause.pod.report
    return cause.class_ in _OF_A_WHOLE_POD and (report is None or report.failure is None)
