"""Pods at whose addresses nothing answers while others miss them, and which of these are forced away at once.

Such a pod is lost with its node, as far as anybody can know; yet it may live behind a partition. A pod of the trainer
can then do no harm: whoever takes its place owns the checkpoints, and its agent and ranks are let into no gang. A
program of the user's own has no such fence, and parameter servers may hear two lives of a worker.
"""

from disttrain_api.scheduling import GangScheduler
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.missed import is_up
from disttrain_operator.decide.observed import PodFacts


def is_unreachable(pod: PodFacts, gang: Gang) -> bool:
    """Return whether nothing answers at the address of a pod that is up, while others miss it. Where that is so of most
    pods, it is the operator that does not hear them."""
    unreachable = gang.observed.unreachable
    few = 2 * len(unreachable) <= len(gang.members)
    return few and pod.uid in unreachable and is_up(pod)


def forced_at_once(gang: Gang, *, alone: bool) -> frozenset[str]:
    """Return the uids of unreachable pods whose names need not wait for `terminationTimeoutSeconds`. alone: the pod is
    made again alone, else the gang is.

    Kubernetes takes the dead node for a sound one by then: so what takes the pod's place must prefer others.
    """
    spec, policy = gang.spec, gang.spec.run_policy
    fenced = spec.training is not None and spec.parameter_servers is None
    scheduler = policy.scheduling_policy.gang_scheduler
    # The gate and Kueue choose nodes themselves, and know of no preference.
    placed = scheduler is GangScheduler.KUEUE or (scheduler is GangScheduler.GATE and not alone)
    if not fenced or placed or not policy.node_suspicion.failures:
        return frozenset()
    return frozenset(pod.uid for pod in gang.observed.pods if is_unreachable(pod, gang))
