"""When a server applies what workers push. Pure but for the shard that it changes.

A push is the mean gradient of a part of a global batch, or what its worker has changed by it, and the part's weight
(its samples or tokens). Each server takes in each part once, whoever computed it and however often it comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disttrain_api.parallelism import ParameterServer, Pushed, Synchronization
from disttrain_api.training import Training
from disttrain_trainer.optim.schedules import learning_rate
from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.server.push_decoder import Updates
from disttrain_trainer.parameter_server.server.shard import Shard

Rate = Callable[[int], float]
"""Learning rate of a step; where changes are averaged, the share of each that is added."""


def rate_of(training: Training, settings: ParameterServer, workers: int) -> Rate:
    """Return the factor of an update: the learning rate, or the share of workers' changes (averaging.py)."""
    if settings.push is Pushed.PARAMETERS:
        whole = settings.synchronization is Synchronization.SYNC or settings.staleness_aware_rate
        share = 1.0 if whole else 1 / workers
        return lambda step: share
    return lambda step: learning_rate(training, step)


@dataclass(frozen=True)
class Push:
    """taken: parts that the server had when the worker pulled."""

    task: Task
    weight: float
    updates: Updates
    taken: int
    floor: int
    """Steps below it are complete: nothing of them will be pushed that must be remembered."""


class Aggregator:
    """Takes pushes in, one update per step (`together`) or per part."""

    def __init__(self, shard: Shard, parts: int, rate: Rate, *, together: bool, staleness_aware: bool = False) -> None:
        """`parts` of each step. `staleness_aware`: the rate of an update is divided by its staleness."""
        self._shard, self._parts, self._rate = shard, parts, rate
        self._together, self._staleness_aware = together, staleness_aware
        self._kept: dict[Task, Push] = {}
        self._seen: set[Task] = set()
        self._floor = 0
        self.taken = 0
        """Parts taken in."""
        self.late = 0
        """Parts that had been taken in before."""
        self.staleness: Counter[int] = Counter()
        """How many pushes came after so many parts of others that were taken in since their pull."""
        self.squares: dict[int, float] = {}
        """Sum of squares of the gradient of the last steps that were updated as a whole."""

    def take(self, push: Push) -> bool:
        """Apply it or keep it for its step. False where its part has been taken in before."""
        if push.task.step < self._floor or push.task in self._seen:
            self.late += 1
            return False
        self._forget_below(push.floor)
        self._seen.add(push.task)
        staleness = self.staleness_of(push.taken)
        self.taken += 1
        if self._together:
            self._kept[push.task] = push
            self._update_step(push.task.step)
            return True
        self.staleness[staleness] += 1
        if push.weight > 0:
            rate = self._rate(push.task.step)
            self._shard.update(push.updates, rate / max(1, staleness) if self._staleness_aware else rate)
        return True

    def staleness_of(self, taken: int) -> int:
        """Return the staleness of a push now: parts of others that were accepted since its pull. 0 if steps are
        whole."""
        return 0 if self._together else max(0, self.taken - taken)

    def remembered(self) -> tuple[int, int, list[int]]:
        """Return what a snapshot must hold beside the shard: accepted parts, the floor, and the tasks above it,
        flattened."""
        return self.taken, self._floor, [number for task in sorted(self._seen) for number in task]

    def remember(self, taken: int, floor: int, seen: list[int]) -> None:
        """The opposite of `remembered`."""
        self.taken, self._floor = taken, floor
        self._seen = {Task(*pair) for pair in zip(seen[::2], seen[1::2], strict=True)}

    def _update_step(self, step: int) -> None:
        """Update once all parts are there: the mean over the global batch, summed in order of parts."""
        tasks = [Task(step, part) for part in range(self._parts)]
        if not all(task in self._kept for task in tasks):
            return
        pushes = [self._kept.pop(task) for task in tasks]
        total = sum(push.weight for push in pushes) or 1.0
        # Tensors or rows, which are added up alike.
        sums: dict[Any, Any] = {}
        for push in pushes:
            for index, gradient in push.updates.items():
                scaled = gradient * (push.weight / total)
                sums[index] = sums[index].add_(scaled) if index in sums else scaled
        square = self._shard.update(sums, self._rate(step))
        if square is not None:
            self.squares[step] = square
        for old in [number for number in self.squares if number < step - 64]:
            del self.squares[old]
        self._floor = max(self._floor, step + 1)

    def _forget_below(self, floor: int) -> None:
        if floor > self._floor:
            self._floor = floor
        self._seen = {task for task in self._seen if task.step >= self._floor}
