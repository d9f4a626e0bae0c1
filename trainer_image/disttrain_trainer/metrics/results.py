"""A step's result, and how the parts of it that ranks hold become figures of the job."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from disttrain_trainer.moe.step import RoutingFigures
from disttrain_trainer.runtime.mesh import World


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
    gradient_norm: Callable[[], Tensor]
    """Returns the norm, once it is known: ranks that hold parts of the gradient sum it while the next step begins."""
    samples: float
    """Samples of all ranks."""
    rate: float
    """Learning rate."""
    loading_seconds: float
    gradient_bytes: int | None = None
    """What this rank has sent for gradients; None where nobody counts it."""
    routing: RoutingFigures | None = None
    skipped: bool = False
    """Whether no update was made of it."""
    skipped_steps: int | None = None
    """Steps of the job that were skipped until now; None where none ever is."""


class Reduction(Protocol):
    """How the results of this rank become figures of the job. Both methods are called by all ranks together."""

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

    def totals(self, results: Sequence[StepResult]) -> list[tuple[float, float]]:
        losses = self.world.sum_tensor(torch.stack([one.loss for one in results])).tolist()
        norms = torch.stack([one.gradient_norm() for one in results])
        # All ranks must find the same.
        mean = self.world.sum_tensor(norms) / self.world.size if self.own_norms else norms
        return list(zip(losses, mean.tolist(), strict=True))

    def figures(self, results: Sequence[StepResult]) -> dict[str, float]:
        last = results[-1]
        own = last.loss.detach().to("cpu", torch.float64) * last.weight / max(last.own_weight, 1.0)
        return {
            "loss_metrics/global_max_loss": float(self.world.max_tensor(own)),
            **(last.routing.metrics(self.world) if last.routing else {}),
            **self.of_layout(),
            **self._sent(results),
        }

    def _sent(self, results: Sequence[StepResult]) -> dict[str, float]:
        """Bytes per step that the rank that sends most has sent for gradients, or for averages of parameters."""
        counts = [one.gradient_bytes for one in results if one.gradient_bytes is not None]
        if not counts:
            return {}
        own = torch.tensor(sum(counts) / len(counts), dtype=torch.float64)
        return {"comm/gradient_bytes": float(self.world.max_tensor(own))}


def not_finite(loss: float, norm: float, *, check_gradients: bool) -> str | None:
    """Return what ends the job: "loss" or "gradient norm"; None where both are sound.

    check_gradients: False with FP16, where the scaler handles gradients that overflow.
    """
    if not math.isfinite(loss):
        return "loss"
    return "gradient norm" if check_gradients and not math.isfinite(norm) else None
