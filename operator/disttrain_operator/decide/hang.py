"""Ranks that train and do no step any more, or do not get on with what they do besides (phase_clocks.py): by what their
agents say, never by what they do not say."""

import math
from datetime import datetime, timedelta

from disttrain_api.names import Reason, Role
from disttrain_api.report import AgentStatus, RankPhase, RankReport, RankStatus
from disttrain_api.run_policy import FailureAction, RestartStrategy
from disttrain_api.spec import JobSpec
from disttrain_api.status import FailureClass, Verdict
from disttrain_operator.decide.attempt_history import ran
from disttrain_operator.decide.cause import Cause
from disttrain_operator.decide.failure_policy import MatchedAction, match_failure_policy
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.live import Stall, Suspicion
from disttrain_operator.decide.observed import PodFacts

MIN_SECONDS = 60
"""Ranks of which none is suspected have so long at least, and a pod that became ready."""
_LONGEST = 5.0
"""So many of the longest of the last steps, where a hang is certain: the job's own limit, within its deadline."""
# Ranks report logged steps alone: so many of the pauses between two of them must have passed, too.
_LOGGED_PAUSES = 3
_DOES = {
    RankPhase.STARTING: "is starting", RankPhase.RESTORING: "is restoring a checkpoint",
    RankPhase.TRAINING: "is training", RankPhase.EVALUATING: "is evaluating",
    RankPhase.SAVING: "is saving a checkpoint", RankPhase.RESTARTING: "is restarting",
}  # fmt: skip
_RESTARTS_ALL = (FailureAction.FAIL_JOB, FailureAction.RESTART_GANG, FailureAction.RESTART_WITHOUT_COUNTING)


def stall_of(status: AgentStatus) -> Stall | None:
    """Return how long all ranks of an agent's pod have trained without a step; None where one does anything else.

    One that never says what it does may train.
    """
    if not status.ranks:
        return None
    trained = [trains(rank) for rank in status.ranks]
    pauses = [rank.seconds_since_step for rank in status.ranks]
    known = [pause for pause in pauses if pause is not None]
    first = min(status.ranks, key=lambda rank: rank.rank)
    if not all(trained) or len(known) < len(pauses) or first.report is None:
        return None
    said = all(rank.report is not None and rank.report.phase is not None for rank in status.ranks)
    return Stall(first.rank, min(known), first.report.step, _pace(first.report), in_training=said)


def trains(rank: RankStatus) -> bool:
    """Return whether a rank takes steps, or runs and never says what it does."""
    report = rank.report
    if report is None or rank.exit_code is not None or report.done or report.error is not None:
        return False
    return report.phase in (RankPhase.TRAINING, None) and report.step < report.total_steps


def _pace(report: RankReport) -> float | None:
    left = report.total_steps - report.step
    return report.remaining_seconds / left if report.remaining_seconds is not None and left > 0 else None


def exceeds(stall: Stall, spec: JobSpec, suspicion: Suspicion | None = None) -> bool:
    """Return whether they have done no step for longer than the job allows, and than its log needs for some lines.

    suspicion: of a rank that seems to hang, by the job's own steps. Without one a short deadline is not enough.
    """
    deadline = spec.run_policy.progress_deadline_seconds
    # A trainer of another version may evaluate, too, and say nothing of it.
    if deadline is None or (spec.training is not None and not stall.in_training):
        return False
    if stall.limit_seconds is not None:
        return stall.seconds >= stall.limit_seconds
    short = suspicion is not None or not stall.in_training
    limit = float(deadline if short else max(deadline, MIN_SECONDS))
    # Where ranks restart in place, an alarm that is false would cost no pod.
    if spec.run_policy.restart_strategy is RestartStrategy.IN_PLACE and suspicion is not None:
        limit = min(limit, _learned_limit(suspicion))
    return stall.seconds >= max(limit, _seconds_for_lines(stall, spec))


def _learned_limit(suspicion: Suspicion) -> float:
    return max(MIN_SECONDS, _LONGEST * suspicion.longest_seconds) if suspicion.blame.certain else math.inf


def is_early(stall: Stall, spec: JobSpec) -> bool:
    """Return whether their time is over by the job's own steps alone: their pods have until the deadline."""
    deadline = spec.run_policy.progress_deadline_seconds
    return deadline is None or stall.seconds < deadline


def _seconds_for_lines(stall: Stall, spec: JobSpec) -> float:
    """The time in which ranks that get on report steps."""
    steps = spec.training.logging.interval if spec.training is not None else 1
    return _LOGGED_PAUSES * steps * (stall.seconds_per_step or 0.0)


def hang_of(gang: Gang, now: datetime) -> Verdict | None:
    """Return the verdict on a gang that hangs; None if it makes progress, is incomplete, or no agent has reported a
    hang."""
    live = gang.observed.live
    if live is None or live.stall is None or live.attempt != gang.attempt or not ran(gang.status):
        return None
    incomplete = gang.missing or gang.succeeded or not all(pod.undisturbed for pod in gang.pods)
    if incomplete or not exceeds(live.stall, gang.spec, live.suspicion):
        return None
    # What was certain when the rank was named may be over, as is known by its stack now.
    if is_early(live.stall, gang.spec) and not (live.stall.blame is not None and live.stall.blame.certain):
        return None
    # A machine that was frozen goes on: its pod is ready again before its ranks have reported a step.
    settled = now - timedelta(seconds=MIN_SECONDS + _seconds_for_lines(live.stall, gang.spec))
    if any(pod.ready_since is not None and pod.ready_since > settled for pod in gang.pods):
        return None
    pod = next((pod for pod in gang.pods if pod.uid == live.pod_uid), None)
    return None if pod is None else _verdict(pod, live.stall, gang)


def _verdict(first: PodFacts, stall: Stall, gang: Gang) -> Verdict:
    """first: the pod of the rank that the stall names."""
    policy, pod = gang.spec.run_policy, first
    rank: int | None = stall.rank
    early = "; its own steps take far less" if is_early(stall, gang.spec) else ""
    blamed, place = "", f"; it is in {stall.stack}" if stall.stack else ""
    of_blamed = pod_of(stall.blame.rank, gang) if stall.blame is not None else None
    if stall.blame is not None and (of_blamed is not None or stall.blame.rank is None):
        rank, pod, place = stall.blame.rank, of_blamed or first, ""
        blamed = f"{subject_of(rank, of_blamed)}{stall.blame.why}: "
    cause = Cause(pod, FailureClass.HANG, Reason.PROGRESS_DEADLINE_EXCEEDED)
    matched = match_failure_policy(policy, cause)
    if matched.action not in _RESTARTS_ALL:
        # What hangs is the gang: no pod is to blame alone, and none has ended.
        matched = MatchedAction(FailureAction.RESTART_GANG)
    return Verdict(
        reason=cause.reason,
        message=f"{blamed}rank {stall.rank} ({place_of(first)}) {_does(stall)}"
        f" (progressDeadlineSeconds: {policy.progress_deadline_seconds}{early}){place}"
        + (f"; {stall.recorded}" if stall.recorded else ""),
        class_=cause.class_,
        action=matched.action,
        rule=matched.rule,
        role=pod.role,
        rank=rank,
        pod=pod.name if rank is not None else None,
        node=pod.node if rank is not None else None,
    )


def _does(stall: Stall) -> str:
    """What the rank has not done, and for how long."""
    if stall.limit_seconds is None:
        return f"has trained for {stall.seconds:.0f} s without a step after step {stall.step}"
    after = f" after step {stall.step}" if stall.step else ""
    return (
        f"{_DOES[stall.phase]}{after} and has shown no sign of progress for {stall.seconds:.0f} s, which is more than"
        f" {stall.limit_seconds:.0f} s"
    )


def pod_of(rank: int | None, gang: Gang) -> PodFacts | None:
    """Return the pod of a rank, if the gang has it."""
    index = rank // gang.spec.workers.ranks_per_pod if rank is not None else None
    return next((one for one in gang.pods if (one.role, one.index) == (Role.WORKER, index)), None)


def subject_of(rank: int | None, pod: PodFacts | None) -> str:
    """Return the begin of a sentence about a rank that is to blame; "" where none is."""
    return f"rank {rank} ({place_of(pod)}) " if rank is not None and pod is not None else ""


def place_of(pod: PodFacts) -> str:
    """Return the pod and its node as a part of a sentence."""
    return f"pod {pod.name} on node {pod.node}" if pod.node else f"pod {pod.name}"
