"""Updates of some rows of a table alone.

Rows that no batch of an update has touched do not change, nor does what the optimizer keeps of them: momentum does not
move them on and weight decay does not shrink them until they are touched again, as with torch.optim.SparseAdam. For SGD
without momentum and weight decay that is the dense update.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from disttrain_api.training import Optimizer
from disttrain_trainer.optim.optimizers import build_optimizer, state_names
from disttrain_trainer.parameter_server.protocol.rows import Rows


def no_state(settings: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the optimizer state of a parameter before its first step; torch.optim creates it only in that step."""
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
