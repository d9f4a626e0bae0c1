"""A pod of a running gang is being deleted by others: a drain, the scheduler, a person. It may end in peace first."""

from disttrain_api.names import Reason
from disttrain_operator.decide.clock import earliest
from disttrain_operator.decide.decision import Event, State, Transition
from disttrain_operator.decide.gang_actions import forced_at
from disttrain_operator.decide.situation import Situation


def pending_deletion(situation: Situation) -> Transition | None:
    """Wait for pods that are being deleted: they write a checkpoint within their grace."""
    going = [pod for pod in situation.gang.pods if pod.deleting and pod.exit is None]
    if not going:
        return None
    first = going[0]
    why = f" ({first.disruption})" if first.disruption else ""
    others = f" and {len(going) - 1} more" if len(going) > 1 else ""
    message = f"pod {first.name}{others} is being deleted{why}: waiting for its checkpoint and its end"
    again = earliest(*(forced_at(pod, situation.run_policy) for pod in going))
    event = Event(Reason.POD_LEAVING, message, warning=True)
    return Transition(State.RUNNING, Reason.POD_LEAVING, message, situation.status, events=(event,), requeue_at=again)
