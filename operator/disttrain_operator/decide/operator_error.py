"""What a job's status says where this operator itself has failed to look at the job."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.status import Condition, ConditionType, JobStatus, Phase
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.conditions import condition
from disttrain_operator.decide.observed import Job


def with_error(job: Job, words: str, now: datetime) -> JobStatus:
    """Return the job's status with the error in its condition `Running`, and all else as it is."""
    known = condition(job.status, ConditionType.RUNNING)
    message = f"the operator failed to look at this job, and tries again: {words}; please report it"
    changed = Condition(
        type=ConditionType.RUNNING,
        status=known.status if known is not None else "False",
        reason=Reason.OPERATOR_ERROR,
        message=message,
        last_transition_time=known.last_transition_time if known is not None else timestamp(now),
        observed_generation=job.generation,
    )
    others = [entry for entry in job.status.conditions if entry.type != ConditionType.RUNNING]
    phase = job.status.phase or Phase.PENDING
    return job.status.model_copy(update={"conditions": [changed, *others], "phase": phase})
