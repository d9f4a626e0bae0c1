"""The things that are done to a gang: what has to go goes, what is missing is made."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from disttrain_api.run_policy import RunPolicy
from disttrain_api.scheduling import GangScheduler
from disttrain_operator.decide.attempt_history import ran
from disttrain_operator.decide.dead_nodes import forced_at_once
from disttrain_operator.decide.decision import Action, CreatePod, CreateSupport, DeletePod
from disttrain_operator.decide.gang import Gang, Identity
from disttrain_operator.decide.observed import PodFacts

# Survivors of a failure are stuck in a collective and have nothing to save.
SURVIVOR_GRACE_SECONDS = 5


@dataclass(frozen=True)
class Removal:
    """Deletions, and when to look whether they have come to an end."""

    actions: tuple[Action, ...] = ()
    requeue_at: datetime | None = None


def remove(
    pods: Iterable[PodFacts],
    policy: RunPolicy,
    now: datetime,
    why: str,
    grace: int | None = None,
    dead: frozenset[str] = frozenset(),
) -> Removal:
    """Delete these pods; by force what does not end in time, and at once those with the uids in `dead`. `grace` None:
    the pods' own grace period."""
    actions: list[Action] = []
    later: list[datetime] = []
    for pod in pods:
        if pod.deletion is None and pod.uid in dead:
            actions.append(DeletePod(pod.name, pod.uid, 0, f"{why}; node {pod.node} is dead, and nobody would end it"))
        elif pod.deletion is None:
            actions.append(DeletePod(pod.name, pod.uid, grace, why))
        elif not pod.deletion.forced:
            force_at = forced_at(pod, policy)
            assert force_at is not None
            if now >= force_at:
                actions.append(DeletePod(pod.name, pod.uid, 0, _why_forced(pod, policy)))
            else:
                later.append(force_at)
    return Removal(tuple(actions), min(later, default=None))


def remove_old(gang: Gang, now: datetime) -> Removal:
    """Remove all pods of other attempts."""
    why = f"attempt {gang.attempt} takes the place of an older one"
    return remove(gang.old, gang.spec.run_policy, now, why, SURVIVOR_GRACE_SECONDS, forced_at_once(gang, gang.old))


def forced_at(pod: PodFacts, policy: RunPolicy) -> datetime | None:
    """When a pod that is being deleted is taken for one that cannot end; None where it is not being deleted.

    Its checkpoints are fenced: what may still run behind a partition can do no harm.
    """
    if pod.deletion is None:
        return None
    # The grace of a pod whose node is lost is nobody's.
    since = pod.deletion.asked if pod.on_lost_node else pod.deletion.deadline
    return since + timedelta(seconds=policy.termination_timeout_seconds)


def _why_forced(pod: PodFacts, policy: RunPolicy) -> str:
    where = f" on node {pod.node}" if pod.node else ""
    return f"it{where} did not end within terminationTimeoutSeconds ({policy.termination_timeout_seconds})"


def create_missing(gang: Gang, dead: tuple[str, ...] = ()) -> tuple[Action, ...]:
    """Creations of all missing members and of what they need. `dead`: as of CreatePod.

    None while a pod of another attempt is alive: two attempts never run side by side.
    """
    if any(pod.pod_alive for pod in gang.old):
        return ()
    return create(gang, gang.missing, dead=dead)


def create(
    gang: Gang, members: Iterable[Identity], replacement: int = 0, dead: tuple[str, ...] = ()
) -> tuple[Action, ...]:
    """Creations of these members, whose names are free, and of what they need. `replacement`, `dead`: as of
    CreatePod."""
    taken = {(pod.role, pod.index) for pod in gang.replaced}
    why = f"attempt {gang.attempt} needs it"
    avoid = tuple(gang.status.attempts[-1].avoided_nodes)
    # A pod that is made again alone joins a gang that has its room: the cluster's scheduler sees to it.
    gated = gang.spec.run_policy.scheduling_policy.gang_scheduler is GangScheduler.GATE and not ran(gang.status)
    pods = tuple(
        CreatePod(role, index, gang.attempt, why, avoid, gated, replacement, dead)
        for role, index in members
        if (role, index) not in taken
    )
    return (CreateSupport(gang.attempt, why), *pods) if pods else ()
