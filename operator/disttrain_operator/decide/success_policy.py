"""The job is complete when all workers have ended with exit code 0."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.status import Verdict
from disttrain_operator.decide.decision import Move, State
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.ledger import in_attempt
from disttrain_operator.decide.observed import Job, Observed


def success_policy(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Complete the job when all workers of the current attempt have succeeded. Parameter servers end with them."""
    assert job.spec is not None
    if not in_attempt(job.status) or not Gang(job.spec, job.status.attempt, observed).all_workers_succeeded:
        return None
    message = f"all {job.spec.workers.replicas} workers succeeded"
    return finish(job.status, now, State.COMPLETE, Verdict(reason=Reason.WORKERS_SUCCEEDED, message=message))
