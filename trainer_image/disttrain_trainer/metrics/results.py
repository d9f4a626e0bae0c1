"""A step's result, and how the parts of it that ranks hold become figures of the job."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from disttrain_trainer.moe.step import RoutingFigures
from disttrain_trainer.parallel.gradient_norm import GradientNorm
from disttrain_trainer.runtime.device import Span
from disttrain_trainer.runtime.mesh import World


class Passes(NamedTuple):
    """A step's forward and backward passes."""

    span: Span
    waits: Sequence[Span] = ()
    """Where they waited for other ranks."""


@dataclass(frozen=True)
class StepResult:
    """An optimizer step as this rank knows it. Tensors stay on the device until a line of the log is due, so that
    nothing waits for them in between."""

    step: int
    """Number of the step, from 1."""
    loss: Tensor
    """This rank's part of the mean loss: sum of its losses / weight of all ranks."""
    weight: float
    """Samples or tokens of all ranks."""
    own_weight: float
    gradient_norm: GradientNorm
    """Ranks that hold parts of the gradient sum it where something of the step needs it, else at a line of the log."""
    samples: float
    """Samples of all ranks."""
    rate: float
    """Learning rate."""
    loading_seconds: float
    passes: Passes | None = None
    """None where they are not timed: in some steps of shards, where it is not known how long they wait for other ranks,
    and where the layout times them."""
    gradient_bytes: int | None = None
    """What this rank has sent for gradients; None where nobody counts it."""
    routing: RoutingFigures | None = None
    skipped: bool = False
    """Whether no update was made of it."""
    may_overflow: bool = False
    """Whether its gradient need not be finite: FP16's loss scale falls then."""
    skipped_steps: int | None = None
    """Steps of the job that were skipped until now; None where none ever is."""


class Reduction(Protocol):
    """How the results of this rank become figures of the job. Both methods are called by all ranks together."""

    @property
    def own_seconds(self) -> Sequence[float]:
        """Seconds per step that each rank worked by itself before the last figures. Empty: ranks are not compared."""

    def totals(self, results: Sequence[StepResult]) -> list[tuple[float, float]]:
        """Return mean loss over all ranks and gradient norm of each step."""

    def figures(self, results: Sequence[StepResult]) -> dict[str, float]:
        """Return further entries of metrics.jsonl for these steps, the last of which is logged."""


@dataclass
class SumOverRanks:
    """The Reduction of ranks that are in the same step: they meet for the sums."""

    world: World
    own_norms: bool = False
    """Whether each rank clips a gradient of its own; the mean of their norms is reported."""
    of_layout: Callable[[], dict[str, float]] = dict
    """What the layout measures of itself since it was last asked."""
    own_time: Callable[[Sequence[StepResult]], float] | None = None
    """Seconds per step that this rank works by itself. None: ranks are not compared."""
    own_seconds: Sequence[float] = ()
    """See `Reduction`."""

    def totals(self, results: Sequence[StepResult]) -> list[tuple[float, float]]:
        norms = [one.gradient_norm for one in results]
        unknown = [(norm, norm.part) for norm in norms if norm.part is not None]
        # One message.
        held = [torch.stack([one.loss for one in results]), *(part.reshape(1) for _, part in unknown)]
        sums = self.world.sum_tensor(torch.cat(held))
        for (norm, _), square in zip(unknown, sums[len(results) :], strict=True):
            norm.settle(square)
        found = torch.stack([norm() for norm in norms])
        # All ranks must find the same.
        mean = self.world.sum_tensor(found) / self.world.size if self.own_norms else found
        return list(zip(sums[: len(results)].tolist(), mean.tolist(), strict=True))

    def figures(self, results: Sequence[StepResult]) -> dict[str, float]:
        last = results[-1]
        loss = last.loss.detach().to("cpu", torch.float64) * last.weight / max(last.own_weight, 1.0)
        own = [] if self.own_time is None else [0.0] * self.world.size
        if self.own_time is not None:
            own[self.world.rank] = self.own_time(results)
        # One message: of a rank's time and the others' zeros the time is the largest.
        numbers = torch.cat([loss.reshape(1), torch.tensor(own, dtype=torch.float64)])
        largest, *self.own_seconds = self.world.max_tensor(numbers).tolist()
        return {
            "loss_metrics/global_max_loss": largest,
            **self._own_times(),
            **(last.routing.metrics(self.world) if last.routing else {}),
            **self.of_layout(),
            **self._sent(results),
        }

    def _own_times(self) -> dict[str, float]:
        if not self.own_seconds:
            return {}
        return {
            "time_metrics/own_median(s)": median(self.own_seconds),
            "time_metrics/own_max(s)": max(self.own_seconds),
        }

    def _sent(self, results: Sequence[StepResult]) -> dict[str, float]:
        """Bytes per step that the rank that sends most has sent for gradients, or for averages of parameters."""
        counts = [one.gradient_bytes for one in results if one.gradient_bytes is not None]
        if not counts:
            return {}
        own = torch.tensor(sum(counts) / len(counts), dtype=torch.float64)
        return {"comm/gradient_bytes": float(self.world.max_tensor(own))}


def not_finite(loss: float, norm: float, *, may_overflow: bool = False) -> str | None:
    """Return what ends the job: "loss" or "gradient norm"; None where both are sound."""
    if not math.isfinite(loss):
        return "loss"
    return None if may_overflow or math.isfinite(norm) else "gradient norm"
