"""From the first pod of an attempt to the moment when all of them run."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.spec import JobSpec
from disttrain_api.status import JobStatus, Verdict
from disttrain_operator.decide.clock import after, earliest, timestamp
from disttrain_operator.decide.decision import Event, Move, State
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.gang_actions import SURVIVOR_GRACE_SECONDS, create_missing, remove, remove_old
from disttrain_operator.decide.ledger import (
    begin_attempt,
    ended_by,
    in_attempt,
    mark_running,
    next_attempt_at,
    ran,
    restarting,
)
from disttrain_operator.decide.observed import Job, Observed
from disttrain_operator.decide.waiting import USUAL_REASONS, why_not_running, why_waiting


def begin(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Begin an attempt where none is under way: the first one, one after a suspension, or after a pause."""
    if in_attempt(job.status):
        return None
    begins_at = next_attempt_at(job.status, _spec(job).run_policy)
    if begins_at is not None and _end(job.status) <= now < begins_at:
        return wait_for_attempt(job, observed, job.status, begins_at, now)
    word = Reason.RESUMED if job.status.attempt else Reason.CREATING_PODS
    return start_attempt(job, observed, job.status, now, Event(word, f"attempt {job.status.attempt + 1} begins"))


def start_attempt(job: Job, observed: Observed, ledger: JobStatus, now: datetime, event: Event) -> Move:
    """The next attempt begins now; pods of older ones are on their way out."""
    ledger = begin_attempt(ledger, _spec(job).run_policy, now)
    events = (event, *_suspicions(ledger))
    return _bring_up(Gang(_spec(job), ledger, observed), now, _deadline(job, ledger), events)


def wait_for_attempt(
    job: Job, observed: Observed, ledger: JobStatus, begins_at: datetime, now: datetime, event: Event | None = None
) -> Move:
    """The next attempt begins later; the pods of the last one go now."""
    policy = _spec(job).run_policy
    why = f"attempt {ledger.attempt} has failed"
    pods = [pod for pod in observed.pods if not pod.gone]
    removal = remove(pods, policy, now, why, SURVIVOR_GRACE_SECONDS)
    verdict = ended_by(ledger)
    message = f"attempt {ledger.attempt + 1} begins at {timestamp(begins_at)}" + (
        f": {verdict.message}" if verdict is not None else ""
    )
    again = earliest(begins_at, removal.look_again_at)
    events = () if event is None else (event,)
    return Move(State.RESTARTING, Reason.BACKING_OFF, message, ledger, removal.actions, events, again)


def start_deadline(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Fail a job whose pods do not all run in time, with the reason why they do not."""
    gang = Gang(_spec(job), job.status, observed)
    if ran(job.status) or gang.all_started or now < _deadline(job, job.status):
        return None
    seconds = _spec(job).run_policy.start_deadline_seconds
    waiting = why_waiting(gang)
    message = (
        f"not all pods ran within startDeadlineSeconds ({seconds}): {waiting[1] if waiting else _unexplained(gang)}"
    )
    reason = waiting[0] if waiting else Reason.START_DEADLINE_EXCEEDED
    return finish(job.status, now, State.FAILED, Verdict(reason=reason, message=message))


def startup(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Bring all pods of the current attempt to run; say why where they do not."""
    if ran(job.status):
        return None
    gang = Gang(_spec(job), job.status, observed)
    if gang.all_started:
        message = f"all {len(gang.members)} pods run"
        event = Event(Reason.ALL_PODS_RUNNING, message)
        ledger = mark_running(job.status, now)
        return Move(State.RUNNING, Reason.ALL_PODS_RUNNING, message, ledger, events=(event,))
    return _bring_up(gang, now, _deadline(job, job.status))


def running(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Nothing to do: the gang runs."""
    gang = Gang(_spec(job), job.status, observed)
    return Move(State.RUNNING, Reason.ALL_PODS_RUNNING, f"all {len(gang.members)} pods run", job.status)


def _bring_up(gang: Gang, now: datetime, deadline: datetime, events: tuple[Event, ...] = ()) -> Move:
    old = remove_old(gang, now)
    replaced = remove(gang.replaced, gang.spec.run_policy, now, "it is made again", SURVIVOR_GRACE_SECONDS)
    actions = (*old.actions, *replaced.actions, *create_missing(gang))
    reason, message = why_not_running(gang)
    if not events and reason not in USUAL_REASONS:
        events = (Event(reason, message, warning=True),)
    state = State.RESTARTING if restarting(gang.ledger) else State.STARTING
    again = earliest(deadline, old.look_again_at, replaced.look_again_at)
    return Move(state, reason, message, gang.ledger, actions, events, again)


def _suspicions(ledger: JobStatus) -> tuple[Event, ...]:
    nodes = ledger.attempts[-1].avoided_nodes
    if not nodes:
        return ()
    sentence = f"attempt {ledger.attempt} avoids {', '.join(nodes)}: several attempts failed first there"
    return (Event(Reason.NODE_SUSPECTED, sentence, warning=True),)


def _unexplained(gang: Gang) -> str:
    """What can be said of pods that nobody gives a reason for: volumes that cannot be mounted, mostly."""
    if gang.unstarted:
        pod = gang.unstarted[0]
        where = f"on node {pod.node}" if pod.node else "on no node yet"
        return f"pod {pod.name} ({where}) gives no reason; the Events of `kubectl describe pod {pod.name}` may"
    return why_not_running(gang)[1]


def _end(status: JobStatus) -> datetime:
    """When the last attempt ended; a clock that was set back since does not make the pause longer."""
    end = status.attempts[-1].end_time
    assert end is not None
    return after(end, 0)


def _deadline(job: Job, ledger: JobStatus) -> datetime:
    """When all pods of the current attempt must run."""
    return after(ledger.attempts[-1].start_time, _spec(job).run_policy.start_deadline_seconds)


def _spec(job: Job) -> JobSpec:
    assert job.spec is not None
    return job.spec
