"""Minimal status of a job, for when the API server refuses the usual one, or this operator has failed.

A report of a pod, or a word of the cluster, may hold what no version of this operator has thought of. It must cost
itself alone: without a status that can be written, a failure would never be counted and its survivors never removed.
"""

from datetime import datetime

from disttrain_api.bounds import MAX_MESSAGE_BYTES, cut
from disttrain_api.names import Reason
from disttrain_api.status import Attempt, Condition, ConditionType, JobStatus, Phase, Verdict
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.conditions import condition
from disttrain_operator.decide.observed import Job

_MAX_WORDS = 600
_MAX_MESSAGE = 300


def minimal_status(wanted: JobStatus, written: JobStatus, refusal: str) -> JobStatus:
    """Return `wanted` with the numbers and times of the operator alone, and with the API server's words in a condition.

    written: the status that stands there, whose progress, checkpoint and count of time the API server has taken.
    """
    return wanted.model_copy(
        update={
            "conditions": [_condition(entry, refusal) for entry in wanted.conditions],
            "progress": written.progress,
            "checkpoint": written.checkpoint,
            "goodput": written.goodput,
            "attempts": [_attempt(attempt, written) for attempt in wanted.attempts],
        }
    )


def _condition(entry: Condition, refusal: str) -> Condition:
    if entry.type != ConditionType.RUNNING:
        return entry.model_copy(update={"message": _plain(entry.message)})
    note = f"the API server refused a part of the status, which is left out: {_plain(refusal)}"
    return entry.model_copy(update={"message": cut(f"{_plain(entry.message)}; {note}", MAX_MESSAGE_BYTES)})


def _attempt(attempt: Attempt, written: JobStatus) -> Attempt:
    """The attempt with what restarts follow from. One that stands there as it is has been taken before."""
    if attempt in written.attempts or attempt.verdict is None:
        return attempt
    verdict = attempt.verdict
    kept = Verdict(
        reason=verdict.reason,
        message=_plain(verdict.message),
        class_=verdict.class_,
        action=verdict.action,
        rule=verdict.rule,
        role=verdict.role,
        pod=verdict.pod,
        node=verdict.node,
        exit_code=verdict.exit_code,
        signal=verdict.signal,
    )
    return attempt.model_copy(update={"verdict": kept})


def _plain(text: str) -> str:
    """Return the beginning of a text, in characters that every API server accepts."""
    kept = cut(text, _MAX_WORDS)
    return cut("".join(letter if letter.isprintable() else " " for letter in kept), _MAX_MESSAGE)


def with_error(job: Job, sentence: str, now: datetime) -> JobStatus:
    """Return the job's status with the error in its condition `Running`, and all else as it is."""
    known = condition(job.status, ConditionType.RUNNING)
    message = f"the operator failed to look at this job, and tries again: {sentence}; please report it"
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
