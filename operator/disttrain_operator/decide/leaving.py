"""A pod of a running gang is being deleted by others: a drain, the scheduler, a person. It may end in peace first."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_operator.decide.clock import earliest
from disttrain_operator.decide.decision import Event, Move, State
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.gang_actions import forced_at
from disttrain_operator.decide.observed import Job, Observed


def leaving(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Wait for pods that are being deleted: they write a checkpoint within their grace."""
    assert job.spec is not None
    gang = Gang(job.spec, job.status, observed)
    going = [pod for pod in gang.pods if pod.deleting and pod.exit is None]
    if not going:
        return None
    first = going[0]
    why = f" ({first.disruption})" if first.disruption else ""
    others = f" and {len(going) - 1} more" if len(going) > 1 else ""
    message = f"pod {first.name}{others} is being deleted{why}: waiting for its checkpoint and its end"
    again = earliest(*(forced_at(pod, job.spec.run_policy) for pod in going))
    event = Event(Reason.POD_LEAVING, message, warning=True)
    return Move(State.RUNNING, Reason.POD_LEAVING, message, job.status, events=(event,), look_again_at=again)
