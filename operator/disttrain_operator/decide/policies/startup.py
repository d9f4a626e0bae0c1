"""From the first pod of an attempt to the moment when all of them run."""

from dataclasses import replace
from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.status import ConditionType, JobStatus, Verdict
from disttrain_operator.decide.addresses import why_without_address
from disttrain_operator.decide.attempt import bring_up, start_attempt, starting_deadline_at, wait_for_attempt
from disttrain_operator.decide.attempt_history import (
    in_attempt,
    mark_admitted,
    mark_running,
    next_attempt_at,
    ran,
    why_never_started,
)
from disttrain_operator.decide.clock import after, earliest
from disttrain_operator.decide.conditions import condition
from disttrain_operator.decide.decision import Event, State, Transition
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.situation import Situation
from disttrain_operator.decide.waiting import USUAL_REASONS, unexplained, why_not_running, why_waiting


def begin(situation: Situation) -> Transition | None:
    """Begin an attempt where none is under way: the first one, one after a suspension, or after a pause."""
    job, observed, status, now = situation.job, situation.observed, situation.status, situation.now
    if in_attempt(status):
        return None
    begins_at = next_attempt_at(status, situation.run_policy)
    deadline = _deadline_in_pause(situation)
    if deadline is not None and now >= deadline and (why := _why_before(status)) is not None:
        return _too_late(situation, why)
    if begins_at is not None and _end(status) <= now < begins_at:
        transition = wait_for_attempt(job, observed, status, begins_at, now)
        return replace(transition, requeue_at=earliest(transition.requeue_at, deadline))
    suspended = condition(status, ConditionType.SUSPENDED)
    resumes = suspended is not None and suspended.reason in (Reason.SUSPENDED, Reason.SUSPENDING)
    word = Reason.RESUMED if resumes else Reason.CREATING_PODS
    # Where it is known already that its pods are refused, that is the news.
    event = None if observed.problems else Event(word, f"attempt {status.attempt + 1} begins")
    return start_attempt(job, observed, status, now, event)


def starting_deadline(situation: Situation) -> Transition | None:
    """Fail a job whose pods do not all run in time, with the reason why they do not."""
    gang = _admitted(situation)
    deadline = starting_deadline_at(situation.job, gang.status)
    if deadline is None or ran(situation.status) or gang.all_run or gang.queued or situation.now < deadline:
        return None
    now = why_waiting(gang) or why_without_address(gang)
    # What takes its usual course now says less than what has kept the same start before.
    why = now if now is not None and now[0] not in USUAL_REASONS else _why_before(situation.status) or now
    return _too_late(
        situation,
        why or (Reason.STARTING_DEADLINE_EXCEEDED, unexplained(gang) or why_not_running(gang, situation.now)[1]),
    )


def startup(situation: Situation) -> Transition | None:
    """Bring all pods of the current attempt to run; say why where they do not."""
    if ran(situation.status):
        return None
    gang = _admitted(situation)
    if gang.all_run:
        message = f"all {len(gang.members)} pods run"
        event = Event(Reason.ALL_PODS_RUNNING, message)
        status = mark_running(gang.status, situation.now)
        return Transition(State.RUNNING, Reason.ALL_PODS_RUNNING, message, status, events=(event,))
    return bring_up(gang, situation.now, starting_deadline_at(situation.job, gang.status))


def running(situation: Situation) -> Transition | None:
    """Nothing to do: the gang runs. What it needs may have been taken away meanwhile, and refused since; and a further
    container may have failed, which fails nothing."""
    if situation.observed.problems and (lacks := why_waiting(situation.gang)) is not None:
        event = Event(*lacks, warning=True)
        return Transition(State.RUNNING, *lacks, situation.status, events=(event,))
    message = f"all {len(situation.gang.members)} pods run"
    failed = [pod for pod in situation.gang.pods if pod.failed_beside]
    if not failed:
        return Transition(State.RUNNING, Reason.ALL_PODS_RUNNING, message, situation.status)
    # Uids are random: however many fail one after the other, the one that is named seldom changes.
    first = min(failed, key=lambda pod: pod.uid)
    others = " (and others)" if len(failed) > 1 else ""
    message = f"{message}; beside the program of pod {first.name}{others} {first.failed_beside}"
    event = Event(Reason.CONTAINER_FAILED, message, warning=True)
    return Transition(State.RUNNING, Reason.CONTAINER_FAILED, message, situation.status, events=(event,))


def _too_late(situation: Situation, why: tuple[str, str]) -> Transition:
    seconds = situation.run_policy.starting_deadline_seconds
    message = f"not all pods ran within startingDeadlineSeconds ({seconds}): {why[1]}"
    reason = Reason.STARTING_DEADLINE_EXCEEDED if why[0] in USUAL_REASONS else why[0]
    return finish(situation.status, situation.now, State.FAILED, Verdict(reason=reason, message=message))


def _why_before(status: JobStatus) -> tuple[str, str] | None:
    """(reason, sentence) of why members of the last attempt did not start, where the same start goes on."""
    verdict = why_never_started(status)
    return None if verdict is None else (verdict.reason, verdict.message)


def _deadline_in_pause(situation: Situation) -> datetime | None:
    """When a start must have ended that goes on with the next attempt; None where a queue will hold that one first."""
    status = situation.status
    if why_never_started(status) is None or status.attempts[-1].admitted_time is not None:
        return None
    return starting_deadline_at(situation.job, status)


def _admitted(situation: Situation) -> Gang:
    """The gang with its admission in the status, if a queue or the gate has let it go and that is not noted yet."""
    gang = situation.gang
    if gang.status.attempts[-1].admitted_time is not None:
        return gang
    released_at = gang.released_at if gang.all_started else None
    if released_at is None and not gang.let_go:
        return gang
    return replace(gang, status=mark_admitted(gang.status, released_at or situation.now))


def _end(status: JobStatus) -> datetime:
    """When the last attempt ended; a clock that was set back since does not make the pause longer."""
    end = status.attempts[-1].end_time
    assert end is not None
    return after(end, 0)
