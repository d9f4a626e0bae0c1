"""A member failed or vanished: the gang is made again from the last checkpoint, or the job fails."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.run_policy import FailureAction
from disttrain_api.status import Verdict
from disttrain_operator.decide.attempt import start_attempt, wait_for_attempt
from disttrain_operator.decide.budget import is_fresh, used_up
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decision import Event, Move, State
from disttrain_operator.decide.failures import Failures
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.ledger import count_restart, end_attempt, in_attempt, next_attempt_at, ran, restarting
from disttrain_operator.decide.observed import Job, Observed
from disttrain_operator.decide.progress import newest_checkpoint
from disttrain_operator.decide.verdict import verdict_of


def restart_policy(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Restart or fail the job when a member of its gang failed or vanished and the failure concerns all."""
    assert job.spec is not None
    if not in_attempt(job.status):
        return None
    gang = Gang(job.spec, job.status, observed)
    failures = Failures(job, gang, now)
    found = failures.of_the_gang
    if found is None:
        return None
    if failures.settled_at is not None:
        message = "a pod failed; waiting for the exits of its peers, to name the first cause"
        return Move(_state(job), Reason.POD_FAILED, message, job.status, look_again_at=failures.settled_at)
    cause, ruling = found
    return _restart_or_fail(job, observed, now, verdict_of(cause, ruling))


def _state(job: Job) -> State:
    if ran(job.status):
        return State.RUNNING
    return State.RESTARTING if restarting(job.status) else State.STARTING


def _restart_or_fail(job: Job, observed: Observed, now: datetime, verdict: Verdict) -> Move:
    assert job.spec is not None
    policy, status = job.spec.run_policy, job.status
    checkpoint = newest_checkpoint(status, observed)
    fresh = is_fresh(checkpoint, status)
    counted = verdict.action is not FailureAction.RESTART_WITHOUT_COUNTING
    if verdict.action is FailureAction.FAIL_JOB:
        return finish(status, now, State.FAILED, verdict)
    if counted and (exhausted := used_up(status, policy, verdict, fresh=fresh)):
        return finish(status, now, State.FAILED, exhausted)
    ended = end_attempt(status, now, verdict, checkpoint.step if checkpoint is not None else None)
    ledger = count_restart(ended, new_checkpoint=fresh, counted=counted)
    begins_at = next_attempt_at(ledger, policy)
    begins = "begins" if begins_at is None else f"begins at {timestamp(begins_at)}"
    event = Event(Reason.GANG_RESTARTED, f"{verdict.message}; attempt {ledger.attempt + 1} {begins}", warning=True)
    if begins_at is not None:
        return wait_for_attempt(job, observed, ledger, begins_at, now, event)
    return start_attempt(job, observed, ledger, now, event)
