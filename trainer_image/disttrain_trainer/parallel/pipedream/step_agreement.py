"""Agreement between ranks in different steps: sums that arrive later, and their consequences for all ranks.

Each rank sends its part of a step when it has updated its stage, and receives the sum some steps later. What follows
(all stop or save, training cannot go on) begins `lag` steps after that step: no rank has admitted that one yet.
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
    """Its samples or tokens, where it counts for its replica, else 0; so are the samples."""
    samples: float
    own_loss: Tensor
    """Mean loss of its replica's samples, where it counts for it."""
    skipped: bool = False
    """Whether it has made no update of it."""


@dataclass(frozen=True)
class GlobalStep:
    """A step as all ranks together know it; steps count from 0 since the pipeline was filled."""

    step: int
    weight: float
    samples: float
    loss: float
    gradient_norm: float
    skipped: bool
    """Whether some rank has made no update of it."""


class Batch(NamedTuple):
    """Steps that have become known together."""

    steps: list[GlobalStep]
    figures: Mapping[str, float]
    """Entries of metrics.jsonl where the last of the steps is `logged`."""


class Listener(Protocol):
    """Receiver of the results."""

    def must_end(self) -> bool:
        """Whether this rank wants all to end; asked once per step."""

    def must_save(self) -> bool:
        """Whether this rank wants all to write a checkpoint; asked once per step."""

    def logged(self, step: int) -> bool:
        """Return whether the step is to be reported as soon as it is known."""

    def may_go_on(self, step: GlobalStep) -> bool:
        """Whether training may go on after this step; asked for each step in order, alike on all ranks."""


class StepAgreement:
    """Agreement on the steps between two drains. Every rank calls `send` for the same steps, each at its own time."""

    def __init__(
        self, world: World, lag: int, sums: PendingSums, figures: PendingSums, measured: Callable[[], dict[str, float]],
        versions: Mapping[int, int],
    ) -> None:  # fmt: skip
        """measured: RankFigures but for the loss, since they were last asked. versions: of each stage, in theory."""
        self._world, self._lag, self._sums, self._figures = world, lag, sums, figures
        self._measured, self._versions = measured, versions

    def open(self, steps: int, listener: Listener) -> None:
        """Begin with step 0; there are `steps` unless something stops them."""
        self._listener = listener
        self.limit = steps
        self.stopping = self.saving = False
        """Whether some rank wanted all ranks to stop, and to save."""
        self._received = 0
        self._unsent: list[RankStep] = []
        self._incomplete: deque[tuple[float, float]] = deque()
        self._known: list[Batch] = []
        self._goes_on = True

    def admits(self, step: int) -> bool:
        """Return whether the step is to be done; wait until all ranks have sent what could forbid it."""
        if step >= self.limit:
            return False
        self._receive(step - self._lag)
        return step < self.limit

    def admits_already(self, step: int) -> bool:
        """Whether the step is known to be, without waiting."""
        while self._received < step - self._lag and self._sums.arrived:
            self._receive(self._received + 1)
        return self._received >= step - self._lag and step < self.limit

    def send(self, step: int, part: RankStep) -> None:
        """This rank has updated its stage."""
        self._unsent.append(part)
        self._sums.start([self._listener.must_end(), self._listener.must_save(), part.weight, part.samples])
        if self._listener.logged(step):
            self._send_figures(log=True)

    def take(self) -> list[Batch]:
        """Return what has become known since the last call. Nothing once training may not go on, until `close`: a rank
        that sees it ends, and ranks that are not as far would wait for it."""
        if not self._goes_on:
            return []
        known, self._known = self._known, []
        return known

    def close(self, steps: int) -> list[Batch]:
        """Receive what is left when every rank has done so many steps; return what was not taken yet."""
        self._receive(steps)
        if self._unsent:
            self._send_figures(log=False)
            self._complete_steps(log=False)
        self._goes_on = True
        return self.take()

    def _receive(self, until: int) -> None:
        """Receive the sums of all steps before `until`."""
        while self._received < until:
            step = self._received
            stop, save, weight, samples = self._sums.wait()
            self._incomplete.append((weight, samples))
            self._received += 1
            self.stopping = self.stopping or stop > 0
            self.saving = self.saving or save > 0
            if self._listener.logged(step):
                self._complete_steps(log=True)
            if self.stopping or self.saving or not self._goes_on:
                self.limit = min(self.limit, step + self._lag + 1)

    def _send_figures(self, *, log: bool) -> None:
        """Send losses and norms of all steps that were not sent yet, and which were skipped; with `log` also a row of
        this rank's measurements."""
        last = self._unsent[-1]
        numbers = torch.stack([*(part.loss for part in self._unsent), *(part.square for part in self._unsent)]).tolist()
        numbers += [float(part.skipped) for part in self._unsent]
        self._unsent.clear()
        if log:
            row = RankFigures(loss=float(last.own_loss), **self._measured())
            numbers += row_among(row, self._world.rank, self._world.size)
        self._figures.start(numbers)

    def _complete_steps(self, *, log: bool) -> None:
        count = len(self._incomplete)
        numbers = self._figures.wait()
        losses, squares, skipped = (numbers[at * count : (at + 1) * count] for at in range(3))
        rows = rows_of(numbers[3 * count :])
        first = self._received - count
        steps = [
            GlobalStep(first + at, weight, samples, losses[at], squares[at] ** 0.5, skipped[at] > 0)
            for at, (weight, samples) in enumerate(self._incomplete)
        ]
        self._incomplete.clear()
        self._known.append(Batch(steps, metrics_of(rows, self._versions) if log else {}))
        self._goes_on = self._goes_on and all(self._listener.may_go_on(one) for one in steps)
