"""Progress of running ranks: at once for display, and for decisions as agents would answer on a cluster."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disttrain_agent.environment import report_dir
from disttrain_api.names import Label, Role
from disttrain_api.report import RankReport, RestartsInPlace, decode_pod_report
from disttrain_api.status import JobStatus
from disttrain_operator.decide.live import Live


@dataclass(frozen=True)
class LiveProgress:
    """The newest figures of a job."""

    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    samples_per_second: float | None = None
    checkpoint_step: int | None = None
    remaining_seconds: float | None = None

    @classmethod
    def of(cls, status: JobStatus) -> "LiveProgress":
        """Return the progress in the status."""
        checkpoint = status.checkpoint.step if status.checkpoint else None
        if status.progress is None:
            return cls(checkpoint_step=checkpoint)
        known = status.progress
        rate, remaining = known.samples_per_second, known.remaining_seconds
        return cls(known.step, known.total_steps, known.loss, rate, checkpoint, remaining)

    def look(self, scratch_folders: Iterable[Path]) -> "LiveProgress":
        """The figures of the lowest rank that reports any, else these."""
        reports = [report for folder in scratch_folders for report in _reports(folder)]
        if not reports:
            return self
        report = min(reports, key=lambda each: each.rank)
        checkpoint = report.checkpoint.step if report.checkpoint else self.checkpoint_step
        rate, remaining = report.samples_per_second, report.remaining_seconds
        return LiveProgress(report.step, report.total_steps, report.loss, rate, checkpoint, remaining)


def live(
    pods: Iterable[dict[str, Any]], scratch: Callable[[str], Path], termination_log: Callable[[str], Path]
) -> Live | None:
    """Return what the first worker of the newest attempt says; None before it says anything.

    scratch, termination_log: folder and termination message of a pod, by its name.
    """
    firsts = [pod for pod in pods if _is_first(pod["metadata"]["labels"])]
    for pod in sorted(firsts, key=_attempt, reverse=True):
        name = pod["metadata"]["name"]
        report, restarts = next(iter(_reports(scratch(name))), None), _restarts(termination_log(name))
        if report is not None or restarts is not None:
            return Live(pod["metadata"]["uid"], _attempt(pod), report, restarts_in_place=restarts)
    return None


def _restarts(termination_log: Path) -> RestartsInPlace | None:
    """Return how often the ranks of a pod have restarted in it; its agent keeps the termination message up to date."""
    try:
        report = decode_pod_report(termination_log.read_text(errors="replace"))
    except OSError:
        return None
    return report.restarts_in_place if report is not None else None


def _is_first(labels: dict[str, str]) -> bool:
    return (labels[Label.ROLE], labels[Label.INDEX]) == (Role.WORKER.value, "0")


def _attempt(pod: dict[str, Any]) -> int:
    return int(pod["metadata"]["labels"][Label.ATTEMPT])


def _reports(scratch: Path) -> Iterable[RankReport]:
    # Only the pod's lowest rank: the others say the same.
    paths = sorted(report_dir(scratch).glob("rank-*.json"), key=lambda path: (len(path.name), path.name))
    for path in paths[:1]:
        with contextlib.suppress(OSError, ValueError):
            report = RankReport.model_validate_json(path.read_bytes())
            if report.total_steps:
                yield report
