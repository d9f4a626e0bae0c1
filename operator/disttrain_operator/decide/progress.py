"""Reports of ranks -> progress and the last checkpoint. Until agents can be asked, reports come with the pods' ends.

They enter the status before any policy looks at it: when a checkpoint became known depends on whose exit was seen
first, and no decision may.
"""

from datetime import datetime

from disttrain_api.report import RankReport
from disttrain_api.status import CheckpointStatus, JobStatus, Metric, Progress
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.ledger import know_checkpoint, renew_budget
from disttrain_operator.decide.observed import Observed


def learn(status: JobStatus, observed: Observed, now: datetime) -> JobStatus:
    """The status with what the pods' reports tell: progress, the newest checkpoint, and the budget that it renews."""
    status = status.model_copy(update={"progress": _progress(status, observed, now)})
    for attempt, report in _reports(observed):
        found, best = report.checkpoint, status.checkpoint
        if found is not None and (best is None or found.step > best.step):
            checkpoint = CheckpointStatus(step=found.step, path=found.path, time=found.time)
            status = know_checkpoint(status, checkpoint, attempt)
    return renew_budget(status)


def _reports(observed: Observed) -> list[tuple[int, RankReport]]:
    """The ranks' reports with their attempts, the newest attempt last and within it the lowest rank last."""
    reported = [
        (pod.attempt, -pod.report.progress.rank, pod.report.progress)
        for pod in observed.pods
        if pod.report is not None and pod.report.progress is not None
    ]
    return [(attempt, report) for attempt, _, report in sorted(reported, key=lambda entry: entry[:2])]


def _progress(status: JobStatus, observed: Observed, now: datetime) -> Progress | None:
    """The progress of the lowest rank of the newest attempt that reported any; `status` where that says nothing new."""
    reports = [report for _, report in _reports(observed) if report.total_steps]
    if not reports:
        return status.progress
    report = reports[-1]
    new = Progress(
        step=report.step,
        total_steps=report.total_steps,
        loss=report.loss,
        samples_per_second=report.samples_per_second,
        metrics=[Metric(name=name, value=value) for name, value in sorted(report.metrics.items())],
        evaluation_failure=report.evaluation_failure,
        update_time=timestamp(now),
    )
    old = status.progress
    if old is not None and old.model_copy(update={"update_time": new.update_time}) == new:
        return old
    return new
