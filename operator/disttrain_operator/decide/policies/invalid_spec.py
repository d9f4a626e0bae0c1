"""A spec that admission could not refuse and that cannot run."""

from datetime import datetime

from disttrain_api.bounds import listed
from disttrain_api.names import Reason
from disttrain_api.status import Verdict
from disttrain_operator.decide.decision import State, Transition
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.observed import Job
from disttrain_operator.decide.situation import Situation


def invalid_spec(situation: Situation) -> Transition | None:
    """Fail the job with all that is wrong in its spec, before its first attempt."""
    job = situation.job
    return refuse(job, situation.now) if job.problems and not job.status.attempt else None


def refuse(job: Job, now: datetime) -> Transition:
    """Fail the job, whose spec may not even be readable."""
    verdict = Verdict(reason=Reason.INVALID_SPEC, message=listed(job.problems))
    return finish(job.status, now, State.FAILED, verdict)
