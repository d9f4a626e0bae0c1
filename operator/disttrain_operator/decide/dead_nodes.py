"""Pods at whose addresses nothing answers while others miss them, and which of these are forced away at once.

Such a pod is taken for lost with its node, but it may live behind a network partition. A pod of the trainer is then
harmless: its replacement owns the checkpoints, and no gang accepts the old pod's agent or ranks. A program of the
user's own has no such fence.
"""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_operator.decide.clock import after
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.missed import is_up
from disttrain_operator.decide.observed import PodFacts
from disttrain_operator.decide.replaceable import waits_for_lost_pods

UNNOTICED_SECONDS = 60
"""For so long Kubernetes may take a dead node for a sound one."""


def is_unreachable(pod: PodFacts, gang: Gang) -> bool:
    """Return whether nothing answers at the address of a pod that is up, while others miss it."""
    return hears_most(gang) and pod.uid in gang.observed.unreachable and is_up(pod)


def hears_most(gang: Gang) -> bool:
    """Return whether the operator hears of at least half of the pods: else it may be itself at fault."""
    observed = gang.observed
    return 2 * len(observed.unreachable | observed.silent) <= len(gang.members)


def forced_at_once(gang: Gang) -> frozenset[str]:
    """Return the uids of unreachable pods that are made again alone and whose names need not wait for
    `terminationTimeoutSeconds`."""
    if gang.spec.training is None or not waits_for_lost_pods(gang.spec):
        return frozenset()
    return frozenset(pod.uid for pod in gang.replaced if is_unreachable(pod, gang))


def unnoticed_nodes(gang: Gang, now: datetime) -> tuple[str, ...]:
    """Return the nodes with which pods were lost so shortly before that the scheduler may still choose them."""
    entries = gang.status.attempts[-1].replacements
    lost = [one.uid for one in entries if one.reason == Reason.NODE_LOST and now < after(one.time, UNNOTICED_SECONDS)]
    return tuple(sorted({pod.node for pod in gang.observed.pods if pod.uid in lost and pod.node is not None}))
