"""The two things that are ever done to a gang: what is left of older attempts goes, what is missing is made."""

from disttrain_operator.decide.actions import Action, CreatePod, CreateSupport, DeletePod
from disttrain_operator.decide.gang import Gang

# Survivors of a failure are stuck in a collective and have nothing to save.
SURVIVOR_GRACE_SECONDS = 5


def delete_old(gang: Gang) -> tuple[Action, ...]:
    """Deletions of all pods of other attempts that are not yet on their way."""
    why = f"attempt {gang.attempt} takes the place of an older one"
    return tuple(DeletePod(pod.name, pod.uid, SURVIVOR_GRACE_SECONDS, why) for pod in gang.old if not pod.deleting)


def create_missing(gang: Gang) -> tuple[Action, ...]:
    """Creations of all missing members and of what they need.

    None while a pod of another attempt is alive: two attempts never run side by side.
    """
    if not gang.missing or any(pod.alive for pod in gang.old):
        return ()
    why = f"attempt {gang.attempt} needs it"
    pods = tuple(CreatePod(role, index, gang.attempt, why) for role, index in gang.missing)
    return (CreateSupport(gang.attempt, why), *pods)
