"""How long a rank has done no step, beside how long its steps take: by a file that the rank writes at each step.

A rank's report has each logged step. These figures have every one, so that a rank that stands still is known after some
steps and not after some lines of the log. They also say what a rank does besides steps, and change as it gets on with
that; for how long it has not, idle.py counts.
"""

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from disttrain_agent.idle import IdleClock
from disttrain_agent.work import Work, Works
from disttrain_api.report import Idle, RankPhase, StepPace

KEPT_STEPS = 128
"""Steps whose times are known: the last ones."""
LEAST_STEPS = 10
"""Steps whose times must be known before anything is said."""
LOOK_SECONDS = 0.1
_MOST_BETWEEN_LOOKS = 0.5
"""Counts of the time between two looks. For the rest the agent was stopped, and its ranks with it, or waited for a
processor."""

LIFE, CHANGES, ACTIVITY, STEPS = range(4)
"""Figures before the times: the process; how often it has written; what it does; steps whose times it has written. The
time of step N is number N % KEPT_STEPS of the times."""
ACTIVITIES = (RankPhase.TRAINING, RankPhase.TRAINING, RankPhase.STARTING, RankPhase.EVALUATING, RankPhase.SAVING)
"""What a rank does, by its number in the file."""
BETWEEN_STEPS, IN_STEPS = range(2)
"""Both are of a rank that trains."""
FIGURES = STEPS + 1 + KEPT_STEPS


def step_times_file(folder: Path, rank: int) -> Path:
    """The file in which a rank keeps the times of its steps. folder: of the reports."""
    return folder / f"rank-{rank}.steps"


class _Steps(NamedTuple):
    """What a rank has written."""

    change: tuple[float, float]
    """Another one: the rank has begun or ended a step, or is another process."""
    activity: int
    seconds: list[float]
    """The times of the last steps, in no order."""


def _read(path: Path) -> _Steps | None:
    """What is in the file; None where a rank has not written it."""
    figures = array("d")
    try:
        figures.frombytes(path.read_bytes())
    except (OSError, ValueError):
        return None
    if len(figures) != FIGURES or not figures[STEPS] >= 0 or not 0 < figures[LIFE] < 2**31:
        return None
    if figures[ACTIVITY] not in range(len(ACTIVITIES)):
        return None
    count = int(min(figures[STEPS], KEPT_STEPS))
    seconds = [one for one in figures[STEPS + 1 : STEPS + 1 + count] if 0 <= one < math.inf]
    return _Steps((figures[LIFE], figures[CHANGES]), int(figures[ACTIVITY]), seconds)


@dataclass
class _Seen:
    steps: _Steps
    still_seconds: float = 0.0


class StepClock:
    """Looks at the times of the steps of a pod's ranks. `watch` must run meanwhile."""

    def __init__(
        self,
        folder: Path,
        ranks: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
        work: Callable[[int], Work | None] | None = None,
    ) -> None:
        """work: what a process has done so far; None: as the kernel says."""
        self._files = {rank: step_times_file(folder, rank) for rank in ranks}
        self._clock, self._looked = clock, clock()
        self._seen: dict[int, _Seen] = {}
        found = Works().of if work is None else work
        self._idle = {rank: IdleClock(found) for rank in self._files}

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """See which ranks have done a step since the last look."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, _MOST_BETWEEN_LOOKS), now
        for rank, path in self._files.items():
            steps, seen = _read(path), self._seen.get(rank)
            self._idle[rank].take(steps and (int(steps.change[0]), steps.change[1], ACTIVITIES[steps.activity]), passed)
            if steps is None:
                self._seen.pop(rank, None)
            elif seen is None or seen.steps.change != steps.change:
                self._seen[rank] = _Seen(steps)
            else:
                seen.still_seconds += passed

    def pace(self, rank: int) -> StepPace | None:
        """Return how a rank gets on; None where it does anything else than steps, or has done too few of them."""
        self.look()
        seen = self._seen.get(rank)
        if seen is None or seen.steps.activity != IN_STEPS or len(seen.steps.seconds) < LEAST_STEPS:
            return None
        seconds = seen.steps.seconds
        return StepPace(
            still_seconds=seen.still_seconds,
            median_seconds=sorted(seconds)[len(seconds) // 2],
            longest_seconds=max(seconds),
        )

    def idle(self, rank: int) -> Idle | None:
        """Return for how long a rank has shown no sign that it gets on; None where that is not known."""
        self.look()
        return self._idle[rank].idle
