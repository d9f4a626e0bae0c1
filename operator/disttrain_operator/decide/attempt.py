"""How an attempt begins, at once or after a pause, and how its gang is brought up: the part that policies share."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.rules.misnamed import advice
from disttrain_api.status import JobStatus
from disttrain_operator.decide.addresses import address_overdue_at
from disttrain_operator.decide.attempt_history import (
    begin_attempt,
    ended_by,
    lost_node,
    restarting,
    start_must_end_at,
)
from disttrain_operator.decide.clock import earliest, timestamp
from disttrain_operator.decide.dead_nodes import chooses_nodes, forced_at_once, noticed_at, unnoticed_nodes
from disttrain_operator.decide.decision import Event, State, Transition
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.gang_actions import SURVIVOR_GRACE_SECONDS, create_missing, remove, remove_old
from disttrain_operator.decide.observed import Observed, ReadableJob
from disttrain_operator.decide.waiting import NO_WARNING, USUAL_REASONS, unexplained_at, why_not_running


def start_attempt(
    job: ReadableJob, observed: Observed, status: JobStatus, now: datetime, event: Event | None
) -> Transition:
    """The next attempt begins now; pods of older ones are on their way out."""
    status = begin_attempt(status, job.spec.run_policy, now)
    first = () if event is None else (event,)
    events = (*first, *_suspicions(status), *_misnamed(job, event, status))
    return bring_up(Gang(job.spec, status, observed), now, starting_deadline_at(job, status), events)


def wait_for_attempt(
    job: ReadableJob,
    observed: Observed,
    status: JobStatus,
    begins_at: datetime,
    now: datetime,
    event: Event | None = None,
) -> Transition:
    """The next attempt begins later; the pods of the last one go now."""
    policy = job.spec.run_policy
    why = f"attempt {status.attempt} has failed"
    pods = [pod for pod in observed.pods if not pod.gone]
    dead = forced_at_once(Gang(job.spec, status, observed), pods)
    removal = remove(pods, policy, now, why, SURVIVOR_GRACE_SECONDS, dead)
    verdict = ended_by(status)
    message = f"attempt {status.attempt + 1} begins at {timestamp(begins_at)}" + (
        f": {verdict.message}" if verdict is not None else ""
    )
    again = earliest(begins_at, removal.requeue_at)
    events = () if event is None else (event,)
    return Transition(State.RESTARTING, Reason.BACKING_OFF, message, status, removal.actions, events, again)


def bring_up(gang: Gang, now: datetime, deadline: datetime | None, events: tuple[Event, ...] = ()) -> Transition:
    """One look at a gang that does not run yet: what has to go goes, what is missing is made, and why it waits."""
    old = remove_old(gang, now)
    replaced = remove(gang.replaced, gang.spec.run_policy, now, "it is recreated", SURVIVOR_GRACE_SECONDS)
    excluded = unnoticed_nodes(gang, now) if chooses_nodes(gang) else ()
    bound = [] if excluded else [pod for pod in gang.pods if pod.excludes_nodes and pod.node is None]
    free = remove(bound, gang.spec.run_policy, now, "no node is ruled out any more")
    actions = (*old.actions, *replaced.actions, *free.actions, *create_missing(gang, excluded))
    reason, message = why_not_running(gang, now)
    if not events and reason not in USUAL_REASONS:
        events = (Event(reason, message, warning=reason not in NO_WARNING),)
    state = State.RESTARTING if restarting(gang.status) else State.STARTING
    looks = (address_overdue_at(gang), unexplained_at(gang), noticed_at(gang, now))
    times = [at for at in looks if at is not None and at > now]
    again = earliest(None if gang.queued else deadline, *times, old.requeue_at, replaced.requeue_at)
    return Transition(state, reason, message, gang.status, actions, events, again)


def _suspicions(status: JobStatus) -> tuple[Event, ...]:
    nodes = status.attempts[-1].avoided_nodes
    if not nodes:
        return ()
    slow = ", or a rank was slow" if any(attempt.slow_node in nodes for attempt in status.attempts) else ""
    lost = ", or it was lost with the last one" if lost_node(status) in nodes else ""
    sentence = f"attempt {status.attempt} avoids {', '.join(nodes)}: several attempts failed first there{slow}{lost}"
    return (Event(Reason.NODE_SUSPECTED, sentence, warning=True),)


def _misnamed(job: ReadableJob, event: Event | None, status: JobStatus) -> tuple[Event, ...]:
    """Containers that were probably meant to train and have another name: once for a spec, not at each restart."""
    if status.attempt > 1 and (event is None or event.reason != Reason.RESUMED):
        return ()
    return tuple(Event(Reason.CONTAINER_MISNAMED, sentence, warning=True) for sentence in advice(job.spec))


def starting_deadline_at(job: ReadableJob, status: JobStatus) -> datetime | None:
    """When all pods of the current attempt must run, unless a queue holds them back; None: whenever they do."""
    seconds = job.spec.run_policy.starting_deadline_seconds
    return None if seconds is None else start_must_end_at(status, seconds)
