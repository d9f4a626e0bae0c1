"""Goodput of a job. Each second counts for the state that the status had then.

State and count stand in the status together, so a replica that takes over goes on with both. The state follows from
what else stands there, so a count needs no write of its own: it comes with the next one.
"""

from datetime import datetime

from disttrain_api.goodput import counted_until
from disttrain_api.names import Reason
from disttrain_api.report import RankPhase, RankReport
from disttrain_api.status import Goodput, GoodputState, JobStatus, Progress
from disttrain_api.times import parse_time
from disttrain_operator.decide.attempt_history import ran
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decision import State, Transition
from disttrain_operator.decide.measured import corrected
from disttrain_operator.decide.observed import Job

_NO_ROOM = frozenset(
    {Reason.QUEUED, Reason.WAITING_FOR_ROOM, Reason.ROOM_LOST, Reason.UNSCHEDULABLE, Reason.QUOTA_EXCEEDED}
)
_OF_PHASE = {
    RankPhase.STARTING.value: GoodputState.STARTING,
    RankPhase.RESTORING.value: GoodputState.RESTORING,
    RankPhase.EVALUATING.value: GoodputState.EVALUATING,
    RankPhase.SAVING.value: GoodputState.SAVING,
    RankPhase.RESTARTING.value: GoodputState.RESTARTING,
}


def account(
    job: Job,
    status: JobStatus,
    transition: Transition,
    now: datetime,
    failed_at: datetime | None = None,
    paused_until: datetime | None = None,
    report: RankReport | None = None,
) -> JobStatus:
    """Return `status`, which the transition leads to, with the time counted until now.

    job: as it was read, before anything was learned. Where nothing else has changed, its count stays as it is.
    failed_at: when ranks failed that have started again in their pods since then; None: none have. paused_until: when
    the pause was over before ranks last did; None: they never did, or without one. report: rank 0's.
    """
    former = job.status.goodput
    if former is not None and status == job.status:
        return status
    furthest = max(former.furthest_step if former is not None else 0, *map(_step, (job.status, status)))
    state = state_of(transition, status.progress, furthest)
    known = former is not None and parse_time(former.update_time) is not None
    before = former if former is not None and known else _begun(job, state, now)
    if before.state == GoodputState.TRAINING and _is_first_word(job.status, status):
        before = _in_state(before, GoodputState.STARTING)
    if failed_at is not None and before.state is not None:
        # A node's clock may be ahead.
        before = _in_state(counted_until(before, min(failed_at, now)), GoodputState.RESTARTING)
    if paused_until is not None and before.state == GoodputState.RESTARTING:
        waiting = counted_until(_in_state(before, GoodputState.WAITING), min(paused_until, now))
        before = _in_state(waiting, GoodputState.RESTARTING)
    counted = counted_until(before, now)
    counted = corrected(counted, report, before.state, heard=job.status.progress is not None)
    return status.model_copy(update={"goodput": counted.model_copy(update={"state": state, "furthest_step": furthest})})


def state_of(transition: Transition, progress: Progress | None, furthest: int) -> GoodputState | None:
    """Return what a job that stands where the transition says spends its time on; None: it has finished.

    One that runs and whose ranks have not said a word trains, as far as anybody knows.
    """
    if transition.state in (State.COMPLETE, State.FAILED):
        return None
    if transition.state in (State.SUSPENDING, State.SUSPENDED):
        return GoodputState.SUSPENDED
    if transition.state is State.RUNNING:
        return GoodputState.RESTARTING if transition.reason == Reason.POD_FAILED else _of_ranks(progress, furthest)
    if transition.reason in _NO_ROOM:
        return GoodputState.QUEUED
    if transition.reason == Reason.BACKING_OFF:
        return GoodputState.WAITING
    return GoodputState.RESTARTING if transition.state is State.RESTARTING else GoodputState.STARTING


def _of_ranks(progress: Progress | None, furthest: int) -> GoodputState:
    if progress is None or progress.phase is None:
        return GoodputState.TRAINING
    training = GoodputState.REDOING if progress.step < furthest else GoodputState.TRAINING
    return _OF_PHASE.get(progress.phase, training)


def _is_first_word(former: JobStatus, status: JobStatus) -> bool:
    """Whether ranks that run say for the first time what they do: until then they were starting."""
    silent = former.progress is None or former.progress.phase is None
    speaks = status.progress is not None and status.progress.phase is not None
    return silent and speaks and ran(former)


def _step(status: JobStatus) -> int:
    return status.progress.step if status.progress is not None else 0


def _in_state(goodput: Goodput, state: GoodputState) -> Goodput:
    return goodput.model_copy(update={"state": state.value})


def _begun(job: Job, state: GoodputState | None, now: datetime) -> Goodput:
    """Return an empty count. For a job that no operator has seen yet it begins when the job was created."""
    made = job.created if job.created is not None and not job.status.conditions else now
    # If a job has ended by the first look, the time until then is counted neither as a start nor as anything else.
    return Goodput(since=timestamp(made), update_time=timestamp(made), state=state or GoodputState.STARTING)
