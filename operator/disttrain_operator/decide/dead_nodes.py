"""Pods at whose addresses nothing answers while others miss them, and which of these are forced away at once.

Such a pod is taken for lost with its node, but it may live behind a network partition. A pod of the trainer is then
harmless: what takes its place, a pod or a gang, owns the checkpoints, and accepts neither the old pod's agent nor its
ranks. A program of the user's own has no such fence.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.scheduling import GangScheduler
from disttrain_operator.decide.attempt_history import last_ended, lost_node, ran
from disttrain_operator.decide.clock import after
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.missed import is_up
from disttrain_operator.decide.observed import PodFacts

UNNOTICED_SECONDS = 60
"""For so long Kubernetes may take a dead node for a sound one."""


def is_unreachable(pod: PodFacts, gang: Gang) -> bool:
    """Return whether nothing answers at the address of a pod that is up, while others miss it."""
    return hears_most(gang) and pod.uid in gang.observed.unreachable and is_up(pod)


def hears_most(gang: Gang) -> bool:
    """Return whether the operator hears of at least half of the pods: else it may be itself at fault."""
    observed = gang.observed
    return 2 * len(observed.unreachable | observed.silent) <= len(gang.members)


def forced_at_once(gang: Gang, pods: Iterable[PodFacts]) -> frozenset[str]:
    """Return the uids of those that are unreachable and whose successors need not wait for
    `terminationTimeoutSeconds`."""
    if gang.spec.training is None or not chooses_nodes(gang):
        return frozenset()
    return frozenset(pod.uid for pod in pods if is_unreachable(pod, gang))


def chooses_nodes(gang: Gang) -> bool:
    """Return whether the cluster's scheduler chooses the nodes of pods that are created now, as soon as it has room.

    Nobody tells a queue that a node is dead, and in one a gang may wait for longer than any node is ruled out.
    """
    scheduler = gang.spec.run_policy.scheduling_policy.gang_scheduler
    return scheduler is not GangScheduler.KUEUE and (scheduler is not GangScheduler.GATE or ran(gang.status))


def unnoticed_nodes(gang: Gang, now: datetime) -> tuple[str, ...]:
    """Return the nodes with which pods were lost so shortly before that the scheduler may still choose them."""
    return tuple(sorted({node for node, time in _losses(gang) if now < after(time, UNNOTICED_SECONDS)}))


def noticed_at(gang: Gang, now: datetime) -> datetime | None:
    """Return when the scheduler knows of the last of these nodes; None: there are none."""
    times = [after(time, UNNOTICED_SECONDS) for _, time in _losses(gang)]
    return max((time for time in times if now < time), default=None)


def _losses(gang: Gang) -> Iterator[tuple[str, str]]:
    """Nodes with which pods of this attempt, or the former attempt, were lost, and when."""
    entries = gang.status.attempts[-1].replacements
    lost = {one.uid: one.time for one in entries if one.reason == Reason.NODE_LOST}
    for pod in gang.observed.pods:
        if pod.uid in lost and pod.node is not None:
            yield pod.node, lost[pod.uid]
    ended, node = last_ended(gang.status), lost_node(gang.status)
    if ended is not None and ended.end_time is not None and node is not None:
        yield node, ended.end_time
