"""The numbers of a status that only policies change: attempts, restarts, times."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.status import Attempt, JobStatus, Verdict
from disttrain_operator.decide.clock import timestamp

KEPT_ATTEMPTS = 10


def begin_attempt(status: JobStatus, now: datetime) -> JobStatus:
    """The next attempt begins."""
    number = status.attempt + 1
    attempts = [*status.attempts, Attempt(number=number, start_time=timestamp(now))]
    return status.model_copy(update={"attempt": number, "attempts": attempts[-KEPT_ATTEMPTS:]})


def end_attempt(status: JobStatus, now: datetime, verdict: Verdict) -> JobStatus:
    """The current attempt, if there is one that has not ended, ends."""
    if not in_attempt(status):
        return status
    return _with_current(status, {"end_time": timestamp(now), "verdict": verdict})


def mark_running(status: JobStatus, now: datetime) -> JobStatus:
    """All pods of the current attempt run."""
    return _with_current(status, {"running_time": timestamp(now)})


def count_restart(status: JobStatus, *, new_checkpoint: bool) -> JobStatus:
    """One more restart; a checkpoint since the last one starts the budget anew."""
    since = 1 if new_checkpoint else status.restarts_since_checkpoint + 1
    return status.model_copy(update={"restarts": status.restarts + 1, "restarts_since_checkpoint": since})


def in_attempt(status: JobStatus) -> bool:
    """Whether an attempt has begun and not ended."""
    return bool(status.attempts) and status.attempts[-1].end_time is None


def ran(status: JobStatus) -> bool:
    """Whether all pods of the current attempt have run at the same time."""
    return in_attempt(status) and status.attempts[-1].running_time is not None


def restarting(status: JobStatus) -> bool:
    """Whether the current attempt was begun because the one before it failed."""
    if len(status.attempts) < 2 or ran(status):
        return False
    previous = status.attempts[-2].verdict
    return previous is not None and previous.reason != Reason.SUSPENDED


def _with_current(status: JobStatus, changes: dict[str, object]) -> JobStatus:
    attempts = [*status.attempts[:-1], status.attempts[-1].model_copy(update=changes)]
    return status.model_copy(update={"attempts": attempts})
