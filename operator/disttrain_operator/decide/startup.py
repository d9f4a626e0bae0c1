"""From the first pod of an attempt to the moment when all of them run."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.spec import JobSpec
from disttrain_api.status import JobStatus, Verdict
from disttrain_operator.decide.clock import after, timestamp
from disttrain_operator.decide.decision import Event, Move, State
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.gang_actions import create_missing, delete_old
from disttrain_operator.decide.ledger import begin_attempt, in_attempt, mark_running, ran, restarting
from disttrain_operator.decide.observed import Job, Observed
from disttrain_operator.decide.waiting import USUAL_REASONS, why_not_running, why_waiting


def begin(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Begin an attempt where none is under way: the first one, or one after a suspension."""
    if in_attempt(job.status):
        return None
    ledger = begin_attempt(job.status, now).model_copy(update={"start_time": timestamp(now)})
    gang = Gang(_spec(job), ledger.attempt, observed)
    actions = (*delete_old(gang), *create_missing(gang))
    reason, message = why_not_running(gang)
    begun = Reason.RESUMED if job.status.attempt else Reason.CREATING_PODS
    event = Event(begun, f"attempt {ledger.attempt} begins")
    return Move(State.STARTING, reason, message, ledger, actions, event, _deadline(job, ledger))


def start_deadline(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Fail a job whose pods do not all run in time, with the reason why they do not."""
    gang = Gang(_spec(job), job.status.attempt, observed)
    if ran(job.status) or gang.all_started or now < _deadline(job, job.status):
        return None
    seconds = _spec(job).run_policy.start_deadline_seconds
    waiting = why_waiting(gang)
    message = f"not all pods ran within startDeadlineSeconds ({seconds})" + (f": {waiting[1]}" if waiting else "")
    reason = waiting[0] if waiting else Reason.START_DEADLINE_EXCEEDED
    return finish(job.status, now, State.FAILED, Verdict(reason=reason, message=message))


def startup(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Bring all pods of the current attempt to run; say why where they do not."""
    if ran(job.status):
        return None
    gang = Gang(_spec(job), job.status.attempt, observed)
    if gang.all_started:
        message = f"all {len(gang.members)} pods run"
        ledger = mark_running(job.status, now)
        return Move(
            State.RUNNING, Reason.ALL_PODS_RUNNING, message, ledger, event=Event(Reason.ALL_PODS_RUNNING, message)
        )
    state = State.RESTARTING if restarting(job.status) else State.STARTING
    actions = (*delete_old(gang), *create_missing(gang))
    reason, message = why_not_running(gang)
    event = Event(reason, message, warning=True) if reason not in USUAL_REASONS else None
    return Move(state, reason, message, job.status, actions, event, _deadline(job, job.status))


def running(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Nothing to do: the gang runs."""
    gang = Gang(_spec(job), job.status.attempt, observed)
    return Move(State.RUNNING, Reason.ALL_PODS_RUNNING, f"all {len(gang.members)} pods run", job.status)


def _deadline(job: Job, ledger: JobStatus) -> datetime:
    """When all pods of the current attempt must run."""
    return after(ledger.attempts[-1].start_time, _spec(job).run_policy.start_deadline_seconds)


def _spec(job: Job) -> JobSpec:
    assert job.spec is not None
    return job.spec
