"""When a job that failed is not restarted: its restarts are used up, or the same failure has come again exactly.

The same is the same exception, at the same place, and no step done in between. Only failures with a signature are
compared, which those that come from outside do not have.
"""

from disttrain_api.bounds import continued
from disttrain_api.names import Reason
from disttrain_api.report import FailureSignature
from disttrain_api.run_policy import FailureAction, RunPolicy
from disttrain_api.status import Attempt, FailureClass, JobStatus, Signature, Verdict
from disttrain_operator.decide.attempt_history import last_known_step


def used_up(status: JobStatus, policy: RunPolicy, verdict: Verdict) -> Verdict | None:
    """The verdict with which the job fails where its restarts are used up, else None."""
    if status.restarts_since_checkpoint < policy.max_restarts:
        return None
    if policy.max_restarts == 0:
        return verdict.model_copy(update={"action": FailureAction.FAIL_JOB})
    sentence = continued(verdict.message, f"maxRestarts ({policy.max_restarts}) without a new checkpoint are used up")
    changes = {"reason": Reason.RESTARTS_EXHAUSTED, "message": sentence, "action": FailureAction.FAIL_JOB}
    return verdict.model_copy(update=changes)


# On the same node they may be the node's, which later attempts avoid.
_OF_A_DEVICE = frozenset({"torch.AcceleratorError"})


def repeated(status: JobStatus, verdict: Verdict, *, in_place: bool = False) -> Verdict | None:
    """The verdict with which the job fails where the current attempt ends as a former one did; else None.

    in_place: its agent says that it met the same failure before, and started the ranks again in vain.
    """
    former = _former(status)
    if verdict.signature is None or verdict.action != FailureAction.RESTART_GANG or verdict.rule is not None:
        return None
    if in_place and verdict.signature.error not in _OF_A_DEVICE:
        return _once_more(verdict, verdict.signature, "a restart in place met the same failure")
    if former is None or former.verdict is None or former.checkpoint_step != last_known_step(status):
        return None
    if former.verdict.signature is None or not _read(verdict.signature).repeats(_read(former.verdict.signature)):
        return None
    if verdict.signature.error in _OF_A_DEVICE and verdict.node == former.verdict.node:
        return None
    return _once_more(verdict, verdict.signature, f"attempt {former.number} ended with the same failure")


def _once_more(verdict: Verdict, signature: Signature, same: str) -> Verdict:
    place = f" at {signature.place}" if signature.place else ""
    why = (
        f"{same} ({signature.error}{place}), and no step was done between them: another restart would end the same way"
    )
    sentence = continued(verdict.message, why)
    return verdict.model_copy(update={"action": FailureAction.FAIL_JOB, "message": sentence})


def _read(signature: Signature) -> FailureSignature:
    """The signature as it was reported; unchecked, since another version may have written it."""
    return FailureSignature.model_construct(
        error=signature.error, place=signature.place, step=signature.step, steps_done=signature.steps_done
    )


def _former(status: JobStatus) -> Attempt | None:
    """The last attempt that its program ended. What the cluster or a person ended in between says nothing of it."""
    ended = (attempt for attempt in reversed(status.attempts) if attempt.end_time is not None)
    return next(
        (attempt for attempt in ended if attempt.verdict and attempt.verdict.class_ == FailureClass.PROGRAM), None
    )
