"""A bound on the whole run; time in suspension does not count, as in batch/v1."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.status import Verdict
from disttrain_operator.decide.clock import after
from disttrain_operator.decide.decision import State, Transition
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.observed import Job
from disttrain_operator.decide.situation import Situation


def active_deadline_at(job: Job) -> datetime | None:
    """When the job fails for its age; None where it does not."""
    seconds = job.spec.active_deadline_seconds if job.spec is not None else None
    if seconds is None or job.status.start_time is None:
        return None
    return after(job.status.start_time, seconds)


def active_deadline(situation: Situation) -> Transition | None:
    """Fail the job when it has been active for too long."""
    deadline = active_deadline_at(situation.job)
    if deadline is None or situation.now < deadline:
        return None
    seconds = situation.spec.active_deadline_seconds
    message = f"the job was active for longer than activeDeadlineSeconds ({seconds})"
    verdict = Verdict(reason=Reason.DEADLINE_EXCEEDED, message=message)
    return finish(situation.status, situation.now, State.FAILED, verdict)
