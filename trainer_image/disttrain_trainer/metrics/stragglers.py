"""Which rank is slow all the time, by what each rank spends on a step by itself. Pure.

Ranks that train in step have the same step time, since the others wait for the slow one. So ranks are compared by their
own time, and only with ranks that do the same work. A window is long enough for a judgement; a rank is slow in it by
medians, which no single slow step or pause moves. It is named after some windows in a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from disttrain_api.report import SlowRank

FACTOR = 1.3
"""Own time / median of the others' from which on a rank is slow."""
WINDOW_SECONDS = 60.0
"""The least that a window takes."""
WINDOW_STEPS = 5
"""The least steps of a window."""
WINDOWS = 3
"""Windows in a row after which a rank is named, and after which one that was named is no longer."""
LEAST_SHARE = 0.1
"""Part of a step's time that a rank must lose to count as slow: less is not noticed."""
_MOST_LINES = 32
"""Lines of a window that are kept."""


class Line(NamedTuple):
    """What is known when a line of the log is due, per step since the line before."""

    own: Sequence[float]
    """Seconds of each rank's own work."""
    step: float
    """Seconds of a step, alike for all ranks."""


@dataclass
class Stragglers:
    """Names the rank that is slow all the time. groups: ranks that do the same work; a lone one is not compared.

    blocks: ranks that wait for each other within their passes. A wait that nobody has seen would make all of them look
    slow, so one of them is slow only if those in other pods are not. pod: ranks per pod.
    """

    groups: Sequence[Sequence[int]]
    blocks: Sequence[Sequence[int]] = ()
    pod: int = 1
    found: SlowRank | None = None
    """The rank that is named, with its times in the last window in which it was slow."""
    _lines: list[Line] = field(default_factory=list)
    _stride: int = 1
    _seen: int = -1
    """Lines of this window. The first line of an attempt, with its compilation, belongs to none."""
    _steps: int = 0
    _seconds: float = 0.0
    _slow: dict[int, int] = field(default_factory=dict)
    """For each rank that was slow in the last window, for how many in a row."""
    _block_of: dict[int, Sequence[int]] = field(default_factory=dict)
    _well: int = 0
    """Windows in a row in which the named rank was not slow."""
    _windows: int = 0
    """Windows in which it was, since the first of those after which it was named."""

    def __post_init__(self) -> None:
        self._block_of = {rank: block for block in self.blocks for rank in block}

    def take(self, own: Sequence[float], steps: int, seconds: float) -> bool:
        """Take the ranks' own times per step for a line of the log; returns whether another rank, or none, is named.

        steps: since the line before. seconds: in all, with what lies between the steps.
        """
        if self._seen < 0:
            self._seen = 0
            return False
        if self._seen % self._stride == 0:
            self._lines.append(Line(own, seconds / steps))
        self._seen += 1
        if len(self._lines) == _MOST_LINES:
            # Every second one stays, and from now on every second one is taken.
            self._lines, self._stride = self._lines[::2], self._stride * 2
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        if self._steps < WINDOW_STEPS or self._seconds < WINDOW_SECONDS:
            return False
        slow = self._slow_ranks()
        self._lines, self._stride, self._seen, self._steps, self._seconds = [], 1, 0, 0, 0.0
        return self._judge(slow)

    def _slow_ranks(self) -> dict[int, SlowRank]:
        """The ranks that were slow in this window."""
        step = median_low(line.step for line in self._lines)
        found = {}
        for group in self.groups:
            own = {rank: median_low(line.own[rank] for line in self._lines) for rank in group}
            for rank, others in _medians_of_others(own).items():
                peers = [own[one] for one in self._block_of.get(rank, ()) if one // self.pod != rank // self.pod]
                least = FACTOR * max(others, *peers, 0.0)
                if own[rank] >= least and own[rank] - others >= LEAST_SHARE * step:
                    found[rank] = SlowRank(rank=rank, seconds=own[rank], others_seconds=others)
        return found

    def _judge(self, slow: Mapping[int, SlowRank]) -> bool:
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        former = self.found
        if former is not None and former.rank in slow:
            self._well, self._windows = 0, self._windows + 1
            self.found = slow[former.rank].model_copy(update={"times": self._windows // WINDOWS})
            return False
        self._well += 1
        if former is not None and self._well < WINDOWS:
            return False
        named = [slow[rank] for rank, windows in self._slow.items() if windows >= WINDOWS]
        self.found = max(named, key=lambda one: one.seconds - one.others_seconds, default=None)
        self._well, self._windows = 0, WINDOWS
        return self.found is not None or former is not None


def _medians_of_others(values: Mapping[int, float]) -> dict[int, float]:
    """For each rank the median of the other ranks' values; of a lone one there is none."""
    if len(values) < 2:
        return {}
    ordered = sorted(values, key=lambda rank: values[rank])
    others = len(ordered) - 1
    found = {}
    for place, rank in enumerate(ordered):
        low, high = (ordered[at + (at >= place)] for at in ((others - 1) // 2, others // 2))
        found[rank] = (values[low] + values[high]) / 2
    return found


def say(found: SlowRank | None) -> str:
    """Return the line of the log on the rank that is named."""
    if found is None:
        return "no rank is slower than the others any more"
    return (
        f"rank {found.rank} is slow: its own work takes {found.seconds * 1000:.0f} ms per step, and"
        f" {found.others_seconds * 1000:.0f} ms (median) that of the others"
    )
