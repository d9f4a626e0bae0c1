"""Reports of ranks -> progress and the last checkpoint. Until agents can be asked, reports come with the pods' ends."""

from datetime import datetime

from disttrain_api.report import RankReport
from disttrain_api.status import CheckpointStatus, JobStatus, Metric, Progress
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.observed import Observed


def latest_reports(observed: Observed) -> list[RankReport]:
    """The ranks' reports, the newest attempt last and within it the lowest rank last."""
    reported = [
        (pod.attempt, -pod.report.progress.rank, pod.report.progress)
        for pod in observed.pods
        if pod.report is not None and pod.report.progress is not None
    ]
    return [report for _, _, report in sorted(reported, key=lambda entry: entry[:2])]


def newest_checkpoint(status: JobStatus, observed: Observed) -> CheckpointStatus | None:
    """The checkpoint with the highest step that was ever reported."""
    best = status.checkpoint
    for report in latest_reports(observed):
        found = report.checkpoint
        if found is not None and (best is None or found.step > best.step):
            best = CheckpointStatus(step=found.step, path=found.path, time=found.time)
    return best


def progress(status: JobStatus, observed: Observed, now: datetime) -> Progress | None:
    """The progress of the lowest rank of the newest attempt that reported any; `status` where that says nothing new."""
    reports = [report for report in latest_reports(observed) if report.total_steps]
    if not reports:
        return status.progress
    report = reports[-1]
    new = Progress(
        step=report.step,
        total_steps=report.total_steps,
        loss=report.loss,
        samples_per_second=report.samples_per_second,
        metrics=[Metric(name=name, value=value) for name, value in sorted(report.metrics.items())],
        update_time=timestamp(now),
    )
    old = status.progress
    if old is not None and old.model_copy(update={"update_time": new.update_time}) == new:
        return old
    return new
