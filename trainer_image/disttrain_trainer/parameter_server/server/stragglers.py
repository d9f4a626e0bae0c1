"""Which workers are slower than the others, by the seconds from a task's assignment to its completion. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

_REMEMBERED = 31
_ENOUGH = 9
RATIO = 1.5
"""Who takes so many times the others' median is a straggler, …"""
RATIO_OF_NONE = 1.2
"""… until it takes less than so many times."""


class Straggler(NamedTuple):
    """A worker, its seconds per task and the median of those of the others."""

    worker: int
    seconds: float
    others: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.others


class Stragglers:
    """Seconds of each worker's last tasks."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self.named: dict[int, Straggler] = {}

    def took(self, worker: int, seconds: float) -> None:
        """A task of the worker's took so long."""
        self._seconds.setdefault(worker, deque(maxlen=_REMEMBERED)).append(seconds)

    def forget(self, worker: int) -> None:
        """It is gone."""
        self._seconds.pop(worker, None)

    def slowest(self) -> Straggler | None:
        """The slowest worker, whether it is a straggler or not; None while too little is known of less than two."""
        typical = self._typical()
        if len(typical) < 2:
            return None
        worker = max(typical, key=lambda one: (typical[one], one))
        return _beside(worker, typical)

    def judge(self) -> tuple[list[Straggler], list[int]]:
        """Return the workers that have become stragglers, and those that are no longer, since the last call."""
        typical = self._typical()
        found = [_beside(worker, typical) for worker in typical if len(typical) > 1]
        limits = {worker: RATIO_OF_NONE if worker in self.named else RATIO for worker in typical}
        now = {one.worker: one for one in found if one.ratio >= limits[one.worker]}
        begun = [one for worker, one in sorted(now.items()) if worker not in self.named]
        over = sorted(_without(self.named, now))
        self.named = now
        return begun, over

    def _typical(self) -> dict[int, float]:
        return {
            worker: statistics.median(seconds) for worker, seconds in self._seconds.items() if len(seconds) >= _ENOUGH
        }


def _beside(worker: int, typical: dict[int, float]) -> Straggler:
    others = statistics.median(seconds for other, seconds in typical.items() if other != worker)
    return Straggler(worker, typical[worker], max(others, 1e-9))


def _without(one: Collection[int], other: Collection[int]) -> set[int]:
    return set(one) - set(other)
