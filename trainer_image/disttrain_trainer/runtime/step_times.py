"""How long this rank's steps take, and that it gets on with what it does besides, in a file for its agent
(disttrain_agent.step_clock): also between lines of the log.

A write costs some microseconds. On a GPU a step ends here when the host has given all of it to the device, so a step
that waits for the device, as at a line of the log, takes longer than others.
"""

import os
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from disttrain_agent.step_clock import (
    ACTIVITIES,
    ACTIVITY,
    BETWEEN_STEPS,
    CHANGES,
    FIGURES,
    IN_STEPS,
    KEPT_STEPS,
    LIFE,
    STEPS,
    step_times_file,
)
from disttrain_api.report import RankPhase


class StepTimes:
    """Writes the times of a rank's steps; without a folder, or where that cannot be written, nothing."""

    def __init__(self, rank: int, folder: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, 0.0
        self._first = True
        self._figures = array("d", bytes(8 * FIGURES))
        self._figures[LIFE] = os.getpid()
        self._file: int | None = None
        # A rank without a place for them trains all the same.
        with suppress(OSError):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(step_times_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within the block this rank takes steps: what lies between two blocks is in no step's time."""
        self._began = self._clock()
        self._write(IN_STEPS)
        try:
            yield
        finally:
            self._write(BETWEEN_STEPS)

    def begin(self, phase: RankPhase) -> None:
        """Note that this rank is in this phase from now on."""
        # What hangs before the first step is judged alike, whatever it does.
        phase = RankPhase.STARTING if phase is RankPhase.RESTORING else phase
        self._write(BETWEEN_STEPS if phase is RankPhase.TRAINING else ACTIVITIES.index(phase))

    @contextmanager
    def during(self, phase: RankPhase) -> Iterator[None]:
        """Within the block this rank is in this phase, and afterwards in the former one."""
        former = self._figures[ACTIVITY]
        self.begin(phase)
        try:
            yield
        finally:
            self._write(former)

    def moved(self) -> None:
        """Note that this rank has got on with what it does, such as by a batch of an evaluation."""
        self._write(self._figures[ACTIVITY])

    def stepped(self) -> None:
        """A step has ended."""
        now = self._clock()
        # The first one may have to be compiled.
        if not self._first:
            count = int(self._figures[STEPS])
            self._figures[STEPS + 1 + count % KEPT_STEPS] = now - self._began
            self._figures[STEPS] = count + 1
        self._first, self._began = False, now
        self._write(IN_STEPS)

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, activity: float) -> None:
        self._figures[ACTIVITY] = activity
        if self._file is None:
            return
        self._figures[CHANGES] += 1
        # At once: who reads meanwhile sees the figures before or after it. A full disk has room for what is there.
        with suppress(OSError):
            os.pwrite(self._file, self._figures, 0)
