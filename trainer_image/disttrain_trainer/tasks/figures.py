"""Figures of a task: sums and weights of many batches and all ranks, and their quotients."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from disttrain_trainer.protocols import Mean
from disttrain_trainer.runtime.mesh import World


class Figures:
    """Sums of figures since they were last taken; tensors stay on the device, so that nothing waits for it."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, figures: Mapping[str, Mean]) -> None:
        """Add the figures of a batch."""
        for name, mean in figures.items():
            device = next((value.device for value in mean if isinstance(value, Tensor)), None)
            total, weight = (_exact(value, device) for value in mean)
            if name in self._sums:
                total, weight = self._sums[name][0] + total, self._sums[name][1] + weight
            self._sums[name] = (total, weight)

    def clear(self) -> None:
        """Forget what was added."""
        self._sums = {}

    def take(self, world: World) -> dict[str, float]:
        """The figures of all ranks by name; called by all ranks together.

        A figure that nothing was judged for is left out, but a loss is then not a number.
        """
        own, self._sums = self._sums, {}
        names = sorted_names(world.gather(sorted(own), list[str]))
        if not names:
            return {}
        zero = torch.zeros((), dtype=torch.float64)
        pairs = [torch.stack([value.cpu() for value in own.get(name, (zero, zero))]) for name in names]
        sums = world.sum_tensor(torch.stack(pairs) * world.counts_outputs).tolist()
        return {
            name: total / weight if weight else math.nan
            for name, (total, weight) in zip(names, sums, strict=True)
            if weight or name == "loss"
        }


def sorted_names(lists: Iterable[Iterable[str]]) -> list[str]:
    """All names once: the loss first, the others in order."""
    return sorted({name for one in lists for name in one}, key=lambda name: (name != "loss", name))


def _exact(value: Tensor | float, device: torch.device | None) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(torch.float64)
    # Not torch.tensor, which copies to a GPU and waits for it.
    return torch.full((), float(value), dtype=torch.float64, device=device)
