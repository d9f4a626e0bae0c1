"""The restarts that a job has left."""

from disttrain_api.bounds import continued
from disttrain_api.names import Reason
from disttrain_api.run_policy import FailureAction, RunPolicy
from disttrain_api.status import JobStatus, Verdict


def used_up(status: JobStatus, policy: RunPolicy, verdict: Verdict) -> Verdict | None:
    """The verdict with which the job fails where its restarts are used up, else None."""
    if status.restarts_since_checkpoint < policy.max_restarts:
        return None
    if policy.max_restarts == 0:
        return verdict.model_copy(update={"action": FailureAction.FAIL_JOB})
    sentence = continued(verdict.message, f"maxRestarts ({policy.max_restarts}) without a new checkpoint are used up")
    changes = {"reason": Reason.RESTARTS_EXHAUSTED, "message": sentence, "action": FailureAction.FAIL_JOB}
    return verdict.model_copy(update=changes)
