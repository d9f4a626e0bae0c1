"""The restarts that a job has left."""

from disttrain_api.names import Reason
from disttrain_api.run_policy import FailureAction, RunPolicy
from disttrain_api.status import CheckpointStatus, JobStatus, Verdict


def is_fresh(checkpoint: CheckpointStatus | None, status: JobStatus) -> bool:
    """Whether the checkpoint is newer than the one in the status."""
    return checkpoint is not None and (status.checkpoint is None or checkpoint.step > status.checkpoint.step)


def used_up(status: JobStatus, policy: RunPolicy, verdict: Verdict, *, fresh: bool) -> Verdict | None:
    """The verdict with which the job fails where its restarts are used up, else None."""
    used = 0 if fresh else status.restarts_since_checkpoint
    if used < policy.max_restarts:
        return None
    if policy.max_restarts == 0:
        return verdict.model_copy(update={"action": FailureAction.FAIL_JOB})
    sentence = f"{verdict.message}; maxRestarts ({policy.max_restarts}) without a new checkpoint are used up"
    changes = {"reason": Reason.RESTARTS_EXHAUSTED, "message": sentence, "action": FailureAction.FAIL_JOB}
    return verdict.model_copy(update=changes)
