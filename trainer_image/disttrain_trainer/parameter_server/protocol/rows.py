"""Rows of a table (the weight of a sparse embedding) whose gradient is that of few rows, and updates of these alone.

Rows that no batch of an update has touched do not change, nor does what the optimizer keeps of them: momentum does not
move them on and weight decay does not shrink them until they are touched again, as with torch.optim.SparseAdam. For SGD
without momentum and weight decay that is the dense update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from disttrain_api.training import Optimizer
from disttrain_trainer.optim.optimizers import build_optimizer, state_names


@dataclass(frozen=True)
class Rows:
    """The gradient of some rows; that of the others is zero. Sums and products look as those of tensors."""

    places: Tensor
    """[n] int64, each once."""
    values: Tensor
    """[n, width]."""

    def __mul__(self, factor: float) -> Rows:
        return Rows(self.places, self.values * factor)

    def add_(self, other: Rows) -> Rows:
        """The sum. Not in place, for there may be more rows in it."""
        return merged(torch.cat([self.places, other.places]), torch.cat([self.values, other.values]))


def merged(places: Tensor, values: Tensor) -> Rows:
    """Rows [n] and their gradients [n, width], of which those of the same row are summed up."""
    once, which = places.unique(return_inverse=True)
    return Rows(once, values.new_zeros(len(once), values.shape[1]).index_add_(0, which, values))


def no_state(settings: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """What the optimizer keeps of a parameter before its first step; torch.optim makes it in its first step only."""
    return {name: torch.zeros(()) if name == "step" else torch.zeros_like(parameter) for name in state_names(settings)}


def update_rows(
    settings: Optimizer, rate: float, parameter: Tensor, state: Mapping[str, Tensor], gradient: Rows
) -> None:
    """One step of the optimizer for these rows of `parameter` [rows x width] and of its state, in place."""
    places, width = gradient.places, gradient.values.shape[1]
    whole = {name: value.view(-1, width) for name, value in state.items() if value.dim() > 0}
    table = parameter.view(-1, width)
    few = nn.Parameter(table[places])
    few.grad = gradient.values
    optimizer = build_optimizer(settings, [few])
    optimizer.param_groups[0]["lr"] = rate
    # One number for the whole table, such as Adam's count of steps, goes on counting in place.
    own = {**state, **{name: values[places] for name, values in whole.items()}}
    if own:
        optimizer.state[few] = own
    optimizer.step()
    table[places] = few.detach()
    for name, values in whole.items():
        values[places] = own[name]
