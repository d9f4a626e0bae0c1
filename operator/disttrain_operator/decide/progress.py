"""Reports of ranks -> progress and the last checkpoint. They come with the pods' ends, and from agents that are asked.

They enter the status before any policy looks at it: when a checkpoint became known depends on whose exit was seen
first, and no decision may.
"""

from datetime import datetime

from disttrain_api.bounds import MAX_REASON_LENGTH, cut
from disttrain_api.names import Reason, Role
from disttrain_api.report import RankPhase, RankReport
from disttrain_api.status import CheckpointStatus, JobStatus, Metric, Progress, TakenRequest
from disttrain_api.times import parse_time
from disttrain_operator.decide.attempt_history import record_checkpoint, renew_budget
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decision import Event
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.observed import Observed, PodFacts


def learn(status: JobStatus, observed: Observed, now: datetime) -> JobStatus:
    """The status with what the pods' reports tell: progress, the newest checkpoint, the budget that it renews, and the
    request for one that was taken."""
    status = status.model_copy(update={"progress": _progress(status, observed, now)})
    live = observed.live
    if live is not None and live.taken_request is not None:
        taken = TakenRequest(value=live.taken_request, attempt=live.attempt)
        status = status.model_copy(update={"checkpoint_request": taken})
    for attempt, report, _ in _reports(status, observed):
        found, best = report.checkpoint, status.checkpoint
        if found is not None and (best is None or found.step > best.step):
            checkpoint = CheckpointStatus(step=found.step, path=found.path, time=found.time)
            status = record_checkpoint(status, checkpoint, attempt)
    return renew_budget(status)


def report_of_rank_0(status: JobStatus, observed: Observed) -> RankReport | None:
    """Return the newest report of rank 0 in the newest attempt in which it has reported; None: there is none now."""
    reports = [report for _, report, _ in _reports(status, observed, late=False) if report.rank == 0]
    return reports[-1] if reports else None


def roll_back_event(before: JobStatus, status: JobStatus) -> tuple[Event, ...]:
    """Return the Event for a roll-back that is new in `status`."""
    if not roll_backs_between(before, status):
        return ()
    count = status.progress.roll_backs if status.progress is not None else None
    sentence = "samples that could not be used are passed over, from a checkpoint before them; their log says which"
    return (Event(Reason.ROLLED_BACK, f"roll-back {count}: {sentence}", warning=True),)


def roll_backs_between(before: JobStatus, status: JobStatus) -> int:
    """Return how many roll-backs are known since `before`."""
    former, now = (0 if one.progress is None else one.progress.roll_backs or 0 for one in (before, status))
    return max(0, now - former)


def skipped_between(before: JobStatus, status: JobStatus) -> int:
    """Return how many skipped steps are known since `before`."""
    former, now = (0 if one.progress is None else one.progress.skipped_steps or 0 for one in (before, status))
    return max(0, now - former)


def _reports(status: JobStatus, observed: Observed, *, late: bool = True) -> list[tuple[int, RankReport, bool]]:
    """The ranks' reports with their attempts, the newest attempt last and within it the lowest rank last.

    Of a rank whose pod was made again alone, what the pod that is gone has said comes first. With each, whether its pod
    still runs. late: whether this has what such a pod has said and another one has gone beyond: that may have ended
    without a word.
    """
    old, replaced = status.progress, {one.uid for attempt in status.attempts[-1:] for one in attempt.replacements}
    reported = [
        (pod.attempt, pod.report.progress, not pod.gone, False)
        for pod in observed.pods
        if pod.report is not None
        and pod.report.progress is not None
        and (late or old is None or pod.uid not in replaced or not _is_of_before(pod.report.progress, old))
    ]
    live = observed.live
    if live is not None and live.report is not None:
        pod = next((pod for pod in observed.pods if _speaks(pod, live.pod_uid)), None)
        if pod is not None and not _is_late(live, pod, live.report, status):
            reported.append((live.attempt, live.report, True, True))
    # Nothing says which of several pods that are gone was the last.
    ordered = sorted(reported, key=lambda entry: (entry[0], -entry[1].rank, entry[2], entry[1].step))
    return [(attempt, report, runs) for attempt, report, _, runs in ordered]


def _is_late(live: Live, pod: PodFacts, report: RankReport, status: JobStatus) -> bool:
    """Whether an answer is older than what the status says, which another replica of the operator may have written: it
    is of former ranks, or of a step before that one. Ranks that have rolled back do a lower step at a later time."""
    restarts, old = (status.attempts[-1].restarts_in_place or 0) if status.attempts else 0, status.progress
    # Other workers' agents know of no restarts.
    generation = restarts if pod.index else live.generation
    if (live.attempt, generation) != (status.attempt, restarts):
        return (live.attempt, generation) < (status.attempt, restarts)
    return old is not None and _is_of_before(report, old)


def _is_of_before(report: RankReport, old: Progress) -> bool:
    known, time = parse_time(old.last_step_time), parse_time(report.step_time)
    return report.step < old.step and known is not None and time is not None and time <= known


def _speaks(pod: PodFacts, uid: str) -> bool:
    """Whether the pod of this uid still runs: once it has ended, its termination message is newer than any answer."""
    return pod.uid == uid and pod.program_started and pod.program_alive


def _progress(status: JobStatus, observed: Observed, now: datetime) -> Progress | None:
    """The progress of the lowest rank of the newest attempt that reported any; `status` where that says nothing new."""
    # Which step ranks that read a checkpoint go on from is known once they have read it.
    said = ((report, runs) for _, report, runs in _reports(status, observed, late=False) if report.total_steps)
    reports = [(report, runs) for report, runs in said if runs or not _restores(report)]
    if _restarts_in_place(status, observed):
        restores = observed.live is not None and _restores(observed.live.report)
        return _in_phase(status.progress, RankPhase.RESTORING if restores else RankPhase.RESTARTING)
    if not reports:
        return status.progress if _first_runs(status, observed) else _in_phase(status.progress, None)
    report, runs = reports[-1]
    old = status.progress
    if old is not None and _restores(report):
        return _in_phase(old, RankPhase.RESTORING)
    remaining = report.remaining_seconds if runs else None
    new = Progress(
        step=report.step,
        total_steps=report.total_steps,
        # As kubectl prints it: in full it is wider than all other columns.
        loss=None if report.loss is None else float(f"{report.loss:.6g}"),
        samples_per_second=report.samples_per_second,
        loading_percent=None if report.loading_share is None else round(100 * report.loading_share),
        # What was counted stays so: ranks that resume from before a step may have counted less.
        skipped_steps=_most(report.skipped_steps, None if old is None else old.skipped_steps),
        roll_backs=_most(report.roll_backs, None if old is None else old.roll_backs),
        metrics=[Metric(name=name, value=value) for name, value in sorted(report.metrics.items())],
        evaluation_failure=report.evaluation_failure,
        phase=cut(report.phase, MAX_REASON_LENGTH) if runs and report.phase else None,
        remaining_seconds=None if remaining is None else round(remaining),
        remaining=None if remaining is None else duration(remaining),
        # A rank that has resumed has logged none yet.
        last_step_time=report.step_time or (None if old is None else old.last_step_time),
        update_time=timestamp(now),
    )
    if old is not None and old.model_copy(update={"update_time": new.update_time}) == new:
        return old
    return new


def _first_runs(status: JobStatus, observed: Observed) -> bool:
    """Whether the first worker runs, whose agent may just not have been asked yet."""
    first = [pod for pod in observed.pods if (pod.role, pod.index, pod.attempt) == (Role.WORKER, 0, status.attempt)]
    return any(pod.program_started and pod.program_alive for pod in first)


def _restarts_in_place(status: JobStatus, observed: Observed) -> bool:
    """Whether the first worker runs and its ranks are starting again: the last step that is known stays until they say
    where they go on."""
    live = observed.live
    if live is None or not live.restarting or live.attempt != status.attempt:
        return False
    return any(_speaks(pod, live.pod_uid) for pod in observed.pods)


def _most(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _restores(report: RankReport | None) -> bool:
    return report is not None and report.phase == RankPhase.RESTORING


def _in_phase(progress: Progress | None, phase: RankPhase | None) -> Progress | None:
    """Progress in another phase than training, or at rest, without what is true only while ranks train."""
    if progress is None:
        return None
    word = None if phase is None else phase.value
    return progress.model_copy(update={"phase": word, "remaining_seconds": None, "remaining": None})


def duration(seconds: float) -> str:
    """Return a time as kubectl writes it, in its two largest units: "3d4h", "1h30m", "45s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
