"""Output for the user while the job runs: a live line on a terminal, plain lines otherwise. All of it goes to
stderr."""

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from disttrain.local.progress import LiveProgress
from disttrain.output import standard_error
from disttrain.terminal import console, duration, steps
from disttrain_api.escape import escaped
from disttrain_api.status import JobStatus
from disttrain_operator.decide.decision import Event

_PLAIN_INTERVAL_SECONDS = 5.0


def open_view(name: str) -> "PlainView | TerminalView":
    """The view that fits standard error."""
    terminal = standard_error().isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return TerminalView(name) if terminal else PlainView(name)


def figures(progress: LiveProgress) -> str:
    """ "step 120/400  loss 0.1234  5,120 samples/s  12m left"; on a terminal without the steps, which a bar shows."""
    parts = [f"step {steps(progress.step, progress.total_steps)}", *_figures(progress)]
    return "  ".join(parts)


def _figures(progress: LiveProgress) -> list[str]:
    parts = []
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    if progress.samples_per_second is not None:
        parts.append(f"{progress.samples_per_second:,.0f} samples/s")
    if progress.remaining_seconds:
        parts.append(f"{duration(progress.remaining_seconds)} left")
    return parts


class PlainView:
    """Lines with the time since the start; progress at most every few seconds. Never a control code."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic, stream: TextIO | None = None) -> None:
        self._name, self._clock, self._stream = name, clock, stream or standard_error()
        self._began = clock()
        self._logged_at = self._began
        self._phase: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def status(self, status: JobStatus) -> None:
        if status.phase != self._phase:
            self._phase = status.phase
            restarts = f"  restarts {status.restarts}" if status.restarts else ""
            self.log(f"{status.phase}  attempt {status.attempt}{restarts}" if status.attempt else f"{status.phase}")

    def progress(self, progress: LiveProgress) -> None:
        now = self._clock()
        if now - self._logged_at >= _PLAIN_INTERVAL_SECONDS or progress.step >= progress.total_steps:
            self._logged_at = now
            self.log(figures(progress))

    def event(self, event: Event) -> None:
        if event.warning:
            self.log(f"{event.reason}: {event.message}")

    def log(self, text: str) -> None:
        elapsed = int(self._clock() - self._began)
        self._stream.write(f"{elapsed // 60:02d}:{elapsed % 60:02d} {escaped(f'{self._name}: {text}')}\n")


class TerminalView:
    """One live line: phase, bar, loss, samples/s, time left, restarts. What happens is printed above it."""

    def __init__(self, name: str) -> None:
        # Imported here: rich costs a tenth of a second that a run without a terminal need not pay.
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._console = console(standard_error(), terminal=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold", markup=False),
            TextColumn("{task.fields[phase]}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[steps]}", markup=False),
            TextColumn("{task.fields[figures]}", markup=False),
            TextColumn("{task.fields[restarts]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(
            name, total=None, phase="Pending", steps="", figures="the ranks start", restarts=""
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def status(self, status: JobStatus) -> None:
        restarts = f"restarts {status.restarts}" if status.restarts else ""
        self._bar.update(self._task, phase=str(status.phase), restarts=restarts)

    def progress(self, progress: LiveProgress) -> None:
        self._bar.update(
            self._task,
            completed=progress.step,
            total=progress.total_steps,
            steps=steps(progress.step, progress.total_steps),
            figures="  ".join(_figures(progress)),
        )

    def event(self, event: Event) -> None:
        if event.warning:
            self._console.print(f"{event.reason}: {event.message}", style="yellow", markup=False, soft_wrap=True)

    def log(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
