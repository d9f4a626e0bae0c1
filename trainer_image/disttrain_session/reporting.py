"""`disttrain.report`: the progress of any training script, in one line.

In a job with a command of its own, the job's progress and figures are what rank 0 has reported (of each pod: its lowest
rank that reports). Outside a job nothing is written.
"""

import atexit
import os
import time
from collections.abc import Callable
from contextlib import suppress

from disttrain_api.report import RankReport
from disttrain_session.asked import be_asked
from disttrain_session.files import ReportFiles, metrics_line
from disttrain_session.place import Place, place_of
from disttrain_session.reported_values import Figures, Pace, checked, plain

INTERVAL_SECONDS = 1.0
"""Between two writes, but for the first and the last step."""


class Reporter:
    """Writes the figures of a rank, at most once per interval. clock: seconds that only grow."""

    def __init__(self, place: Place, clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._clock = ReportFiles(place), clock
        self._rank = place.rank
        self._pending: Figures | None = None
        self._written_at: float | None = None
        self._last: RankReport | None = None
        self._pace = Pace(clock)

    def take(self, figures: Figures) -> None:
        """Keep the figures, and write them where that is due."""
        self._pending = figures
        now = self._clock()
        if self._written_at is None or now - self._written_at >= INTERVAL_SECONDS or figures.step == figures.total:
            self._written_at = now
            self.flush()

    def flush(self) -> None:
        """Write what was taken since the last write."""
        figures, self._pending = self._pending, None
        if figures is None:
            return
        remaining = self._pace.remaining_seconds(figures.step, figures.total)
        report = self._last = _report_of(self._rank, figures, remaining)
        self._files.write(report)
        self._files.add_line(metrics_line(report))
        if report.step == report.total_steps:
            # Not before: should the program fail, the end of its log says why, and a message would take its place.
            self._files.leave(report)

    def leave(self) -> None:
        """Leave the last report in the pod's termination message: the program has succeeded."""
        self.flush()
        if self._last is not None:
            self._files.leave(self._last)


def report(
    *, step: int, total: int, loss: float | None = None, samples_per_second: float | None = None, **figures: float
) -> None:
    """Report that `step` of `total` steps are done, with the loss and up to 64 figures of any names.

    Numbers are Python's or NumPy's, or tensors of one element. Writes at most once a second, and always at the last
    step, so a call costs microseconds; of a tensor on a GPU, only a call that writes waits for it. A loop that ends
    early says so by a last call with total=step. Files that cannot be written are passed over.

    Raises ValueError that names an argument which is no such number.
    """
    found = checked(step, total, loss, samples_per_second, figures)
    reporter = _reporter()
    if reporter is not None:
        reporter.take(found)


def _report_of(rank: int, figures: Figures, remaining_seconds: float | None) -> RankReport:
    numbers = {name: plain(value) for name, value in figures.others.items()}
    return RankReport(
        rank=rank,
        step=figures.step,
        total_steps=figures.total,
        loss=plain(figures.loss),
        samples_per_second=plain(figures.samples_per_second),
        remaining_seconds=remaining_seconds,
        metrics={name: number for name, number in numbers.items() if number is not None},
    )


_reporters: dict[int, Reporter | None] = {}
"""By process id: a fork of a process that reports is another one."""


def _reporter() -> Reporter | None:
    pid = os.getpid()
    if pid not in _reporters:
        place = place_of(os.environ)
        _reporters[pid] = reporter = None if place is None else Reporter(place)
        if place is not None and reporter is not None:
            be_asked(place)
            atexit.register(_flush_at_exit, reporter, pid)
    return _reporters[pid]


def _flush_at_exit(reporter: Reporter, pid: int) -> None:
    # Whatever a tensor's device has become by now.
    with suppress(Exception):
        if os.getpid() == pid:
            reporter.flush()
