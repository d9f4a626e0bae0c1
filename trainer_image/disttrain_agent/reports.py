"""Reports of the ranks, and the pod's termination message made of them."""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from disttrain_agent.checkpoint_request import checkpoint_request_file
from disttrain_agent.environment import collectives_file, collectives_pipe, meeting_file, stacks_file, threads_file
from disttrain_agent.own_ranks import process_file
from disttrain_agent.restart import Kept
from disttrain_agent.step_clock import step_times_file
from disttrain_api.report import (
    MAX_FIGURES_BYTES,
    MAX_TERMINATION_MESSAGE_BYTES,
    CheckpointReport,
    Figures,
    PodReport,
    RankFailure,
    RankPhase,
    RankReport,
    RestartsInPlace,
    encode_pod_report,
)
from disttrain_api.times import timestamp

LOOK_SECONDS = 2.0
"""Between two looks at the ranks' reports."""
_STOPPED_SECONDS = 5 * LOOK_SECONDS
"""Nobody has looked for so long: this process was stopped, and with it the ranks, or their machine."""
_FALLOC_FL_KEEP_SIZE = 1
"""A flag of fallocate(2)."""
_REPORT_BYTES = 8192
"""As much as a report with the longest error has."""


class Reports:
    """The report files of this pod's ranks, read again only where they changed. Somebody looks every LOOK_SECONDS."""

    def __init__(
        self,
        folder: Path,
        ranks: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """clock: for what has passed. now: the time of day."""
        self._folder, self._ranks, self._clock, self._time_of_day = folder, tuple(ranks), clock, now
        self._looked, self._stopped = clock(), 0.0
        self._stepped: dict[int, float] = {}
        self._read: dict[int, tuple[tuple[int, int], RankReport]] = {}
        self._before: RankReport | None = None
        self._checkpoint: CheckpointReport | None = None

    @property
    def kept(self) -> Kept:
        """The newest checkpoint that a rank has reported in any life, and where this life began."""
        said = (report.began for rank in self._ranks if (report := self.of(rank)) is not None)
        began = next((step for step in said if step is not None), None)
        return Kept(None if self._checkpoint is None else self._checkpoint.step, began)

    def forget(self) -> None:
        """Remove what a former life has left where the scratch folder outlives a pod: no rank of this one has begun."""
        with suppress(OSError):
            for path in self._folder.iterdir():
                path.unlink()
            self._folder.rmdir()

    def begin_again(self) -> None:
        """Go on with the reports of another life of the ranks in this pod. Raises OSError as `prepare`.

        The newest checkpoint is remembered: who asks now and then may not have heard of it.
        """
        progress = self.progress()
        self._before = None if progress is None else progress.model_copy(update={"error": None})
        self._read.clear()
        self._stepped.clear()
        self.prepare()

    def prepare(self) -> None:
        """Make the folder, by which the operator's probe knows that ranks are being started. Raises OSError.

        What a former life has left in it says nothing about this one.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in (meeting_file(self._folder), checkpoint_request_file(self._folder)):
            path.unlink(missing_ok=True)
        files = (stacks_file, threads_file, collectives_pipe, collectives_file, step_times_file, process_file)
        for rank in self._ranks:
            path = report_path(self._folder, rank)
            path.unlink(missing_ok=True)
            for file in (*files, figures_file):
                file(self._folder, rank).unlink(missing_ok=True)
            # A rank can fail on a disk that is full before its first report.
            _reserve(path, _REPORT_BYTES)

    def of(self, rank: int) -> RankReport | None:
        """The latest report of a rank, None before its first."""
        self._now()
        path = report_path(self._folder, rank)
        # Half a report cannot be seen, ranks rename; one of another version of the trainer is as good as none.
        with contextlib.suppress(OSError, ValueError):
            stat = path.stat()
            version = (stat.st_mtime_ns, stat.st_ino)
            if self._read.get(rank, (None, None))[0] != version:
                self._take(rank, version, RankReport.model_validate_json(path.read_bytes()))
        return self._read[rank][1] if rank in self._read else None

    def done(self, rank: int) -> bool:
        """Whether a rank has reported that its work is done."""
        report = self.of(rank)
        return report is not None and report.done

    def trains(self, rank: int) -> bool:
        """Whether a rank's last report is of training."""
        report = self.of(rank)
        return report is not None and report.phase == RankPhase.TRAINING

    def _take(self, rank: int, version: tuple[int, int], report: RankReport) -> None:
        former = self._read.get(rank)
        if _is_news(None if former is None else former[1], report, stepped=rank in self._stepped):
            self._stepped[rank] = self._now()
        report = report.model_copy(update={"step_time": self._step_time(None if former is None else former[1], report)})
        found, newest = report.checkpoint, self._checkpoint
        if found is not None and (newest is None or found.step > newest.step):
            self._checkpoint = found
        elif newest is not None and self._before is not None:
            report = report.model_copy(update={"checkpoint": newest})
        self._read[rank] = (version, report)

    def _step_time(self, former: RankReport | None, report: RankReport) -> str | None:
        """Return when the step of a report was logged."""
        if former is None:
            return timestamp(self._time_of_day()) if report.loss is not None else None
        # Before it trains, a rank goes from step 0 to the one at which it resumes.
        trains = report.loss is not None or report.phase == RankPhase.TRAINING or former.step > 0
        return timestamp(self._time_of_day()) if trains and report.step != former.step else former.step_time

    def seconds_since_step(self, rank: int) -> float | None:
        """Return how long ago a report with another step was seen, or with another phase after it; None: none was.

        Time in which this process was stopped does not count.
        """
        at = self._stepped.get(rank)
        return None if at is None else self._now() - at

    def _now(self) -> float:
        """The time, without that in which this process was stopped."""
        now = self._clock()
        pause, self._looked = now - self._looked, now
        if pause > _STOPPED_SECONDS:
            self._stopped += pause
        return now - self._stopped

    def progress(self) -> RankReport | None:
        """The report of the lowest rank that has one, else the last one of a former life in this pod."""
        return next((report for rank in self._ranks if (report := self.of(rank)) is not None), self._before)


def _is_news(former: RankReport | None, report: RankReport, *, stepped: bool) -> bool:
    """Whether a rank has done a step. After a long evaluation it has not stood still: its time begins anew."""
    if former is None:
        # It may have logged its first steps before anybody looked. Before them it has no loss, wherever it resumes.
        return report.loss is not None
    return former.step != report.step or (stepped and former.phase != report.phase)


class TerminationMessage:
    """The pod's termination message, kept up to date while it lives: a container that is killed cannot write any."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = ""
        # Now: a disk can fill up before there is anything to report. Empty, it leaves the kubelet the end of the log.
        _reserve(path, MAX_TERMINATION_MESSAGE_BYTES)

    def write(
        self,
        progress: RankReport | None,
        failure: RankFailure | None = None,
        restarts_in_place: RestartsInPlace | None = None,
    ) -> None:
        """Write it if it changed. Without a place for it the pod still works."""
        report = PodReport(progress=progress, failure=failure, restarts_in_place=restarts_in_place)
        text = "" if report == PodReport() else encode_pod_report(report)
        if text == self._written:
            return
        # In place: the file is a bind mount of the kubelet's and cannot be renamed over. It is cut off last: on a full
        # disk its blocks are all there is.
        with contextlib.suppress(OSError), open(self._path, "r+b", opener=_opener) as file:
            file.write(text.encode())
            file.truncate()
            self._written = text


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o644)


def report_path(folder: Path, rank: int) -> Path:
    """The file in which a rank keeps its report."""
    return folder / f"rank-{rank}.json"


def figures_file(folder: Path, rank: int) -> Path:
    """The file in which a rank keeps the figures of the last step that it has logged. folder: of the reports."""
    return folder / f"rank-{rank}.figures"


def figures_of(folder: Path, rank: int) -> Figures:
    """Return what a rank has written there; nothing where it has written none, or something else."""
    with suppress(OSError, ValueError), figures_file(folder, rank).open("rb") as file:
        content = file.read(MAX_FIGURES_BYTES + 1)
        if len(content) <= MAX_FIGURES_BYTES:
            return Figures.model_validate_json(content).model_copy(update={"rank": rank})
    return Figures(rank=rank)


def _reserve(path: Path, size: int) -> None:
    """Make the file where it is missing, and keep blocks for `size` bytes; what it holds, and how much, stays.

    Where the system knows no such thing, or has no room, nothing is kept.
    """
    with suppress(OSError, AttributeError), os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        # os.posix_fallocate would make the file longer.
        offset, length = ctypes.c_long(0), ctypes.c_long(size)
        ctypes.CDLL(None).fallocate(file.fileno(), _FALLOC_FL_KEEP_SIZE, offset, length)
