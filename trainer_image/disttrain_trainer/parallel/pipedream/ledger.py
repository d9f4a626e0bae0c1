"""Agreement between ranks in different steps: sums that arrive later, and their consequences for all ranks.

Each rank says its part of a step when it has updated its stage, and hears the sum some steps later. What follows (all
stop, a loss is not finite) begins `lag` steps after the one that it was said in, which no rank has admitted yet.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from disttrain_trainer.parallel.pipedream.metrics import RankFigures, metrics_of, row_among, rows_of
from disttrain_trainer.parallel.pipedream.pending_sums import PendingSums
from disttrain_trainer.runtime.mesh import World


@dataclass(frozen=True)
class RankStep:
    """A rank's part of a step; tensors stay on the device until a line of the log is due."""

    loss: Tensor
    """Its part of the mean loss of all replicas."""
    square: Tensor
    """Its part of the square of the gradient's 2-norm."""
    weight: float
    """Its samples or tokens, where it speaks for its replica, else 0; so are the samples."""
    samples: float
    own_loss: Tensor
    """Mean loss of its replica's samples, where it speaks for it."""


@dataclass(frozen=True)
class GlobalStep:
    """A step as all ranks together know it; steps count from 0 since the pipeline was filled."""

    step: int
    weight: float
    samples: float
    loss: float
    gradient_norm: float


class Batch(NamedTuple):
    """Steps that have become known together."""

    steps: list[GlobalStep]
    figures: Mapping[str, float]
    """Entries of metrics.jsonl where the last of the steps is `logged`."""


class Listener(Protocol):
    """Receiver of the results."""

    def must_end(self) -> bool:
        """Whether this rank wants all to end; asked once per step."""

    def logged(self, step: int) -> bool:
        """Return whether the step is to be reported as soon as it is known."""

    def sound(self, loss: float, norm: float) -> bool:
        """Whether training may go on after a step with this loss and gradient norm."""


class Ledger:
    """Ledger of the steps between two drains. Every rank calls `say` for the same steps, each at its own time."""

    def __init__(
        self, world: World, lag: int, news: PendingSums, figures: PendingSums, measured: Callable[[], dict[str, float]],
        versions: Mapping[int, int],
    ) -> None:  # fmt: skip
        """measured: RankFigures but for the loss, since they were last asked. versions: of each stage, in theory."""
        self._world, self._lag, self._news, self._figures = world, lag, news, figures
        self._measured, self._versions = measured, versions

    def open(self, steps: int, listener: Listener) -> None:
        """Begin with step 0; there are `steps` unless something stops them."""
        self._listener = listener
        self.limit = steps
        self.stopping = False
        """Whether some rank wanted all to end."""
        self._heard = 0
        self._unsaid: list[RankStep] = []
        self._untold: deque[tuple[float, float]] = deque()
        self._known: list[Batch] = []
        self._sound = True

    def admits(self, step: int) -> bool:
        """Return whether the step is to be done; wait until all ranks have sent what could forbid it."""
        if step >= self.limit:
            return False
        self._hear(step - self._lag)
        return step < self.limit

    def admits_already(self, step: int) -> bool:
        """Whether the step is known to be, without waiting."""
        while self._heard < step - self._lag and self._news.arrived:
            self._hear(self._heard + 1)
        return self._heard >= step - self._lag and step < self.limit

    def say(self, step: int, part: RankStep) -> None:
        """This rank has updated its stage."""
        self._unsaid.append(part)
        self._news.say([self._listener.must_end(), part.weight, part.samples])
        if self._listener.logged(step):
            self._say_figures(log=True)

    def take(self) -> list[Batch]:
        """Return what has become known since the last call. Nothing once a step was not sound, until `close`: whoever
        hears of it ends, and ranks that are not as far would wait for it."""
        if not self._sound:
            return []
        known, self._known = self._known, []
        return known

    def close(self, steps: int) -> list[Batch]:
        """Hear all that is left when every rank has done so many steps; return what was not taken yet."""
        self._hear(steps)
        if self._unsaid:
            self._say_figures(log=False)
            self._tell(log=False)
        self._sound = True
        return self.take()

    def _hear(self, until: int) -> None:
        """Receive the sums of all steps before `until`."""
        while self._heard < until:
            step = self._heard
            stop, weight, samples = self._news.hear()
            self._untold.append((weight, samples))
            self._heard += 1
            self.stopping = self.stopping or stop > 0
            if self._listener.logged(step):
                self._tell(log=True)
            if self.stopping or not self._sound:
                self.limit = min(self.limit, step + self._lag + 1)

    def _say_figures(self, *, log: bool) -> None:
        """Send losses and norms of all steps that were not sent yet; with `log` also a row of this rank's
        measurements."""
        last = self._unsaid[-1]
        numbers = torch.stack([*(part.loss for part in self._unsaid), *(part.square for part in self._unsaid)]).tolist()
        self._unsaid.clear()
        if log:
            row = RankFigures(loss=float(last.own_loss), **self._measured())
            numbers += row_among(row, self._world.rank, self._world.size)
        self._figures.say(numbers)

    def _tell(self, *, log: bool) -> None:
        count = len(self._untold)
        numbers = self._figures.hear()
        losses, squares, rows = numbers[:count], numbers[count : 2 * count], rows_of(numbers[2 * count :])
        first = self._heard - count
        steps = [
            GlobalStep(first + at, weight, samples, losses[at], squares[at] ** 0.5)
            for at, (weight, samples) in enumerate(self._untold)
        ]
        self._untold.clear()
        self._known.append(Batch(steps, metrics_of(rows, self._versions) if log else {}))
        self._sound = self._sound and all(self._listener.sound(one.loss, one.gradient_norm) for one in steps)
