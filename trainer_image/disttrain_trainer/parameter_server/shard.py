"""What one server holds: ranges of the flattened parameters, and torch's optimizer over them.

SGD, Adam and AdamW treat every number by itself, so parameters cut into ranges are updated as whole ones are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from disttrain_api.training import Optimizer
from disttrain_trainer.optimizers import build_optimizer

OptimizerState = Mapping[str, Tensor]
"""By name: a tensor as long as the range, or one number."""


class Shard:
    """The numbers of some ranges and their optimizer; `version` counts the updates."""

    def __init__(self, values: Sequence[Tensor], settings: Optimizer, states: Sequence[OptimizerState] = ()) -> None:
        """`values`: [length] of each range, which are copied; `states`: the optimizer's state of each, if any."""
        self.version = 0
        self._parameters = [nn.Parameter(value.clone()) for value in values]
        self._optimizer = build_optimizer(settings, self._parameters) if self._parameters else None
        for parameter, state in zip(self._parameters, states, strict=False):
            if state and self._optimizer is not None:
                self._optimizer.state[parameter] = {
                    name: value.clone() if len(value) == len(parameter) and not _is_number(name) else value[0].clone()
                    for name, value in state.items()
                }
        self._copy: list[Tensor] | None = None

    @property
    def lengths(self) -> list[int]:
        return [len(parameter) for parameter in self._parameters]

    @property
    def formats(self) -> list[torch.dtype]:
        return [parameter.dtype for parameter in self._parameters]

    def values(self) -> list[Tensor]:
        """A copy of the numbers, made once per version: it is still being sent when the next update comes."""
        if self._copy is None:
            self._copy = [parameter.detach().clone() for parameter in self._parameters]
        return self._copy

    def update(self, gradients: Mapping[int, Tensor], rate: float) -> float:
        """One step of the optimizer. `gradients`: of each range that has one. Returns the sum of their squares."""
        square = 0.0
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad = gradients.get(index)
            if gradient is not None:
                square += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._optimizer.zero_grad()
        self.version += 1
        self._copy = None
        return square

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """A copy of the optimizer's state of each range, one-dimensional; empty before its first update."""
        if self._optimizer is None:
            return []
        return [
            {
                name: value.detach().clone().reshape(-1)
                for name, value in self._optimizer.state.get(parameter, {}).items()
                if torch.is_tensor(value)
            }
            for parameter in self._parameters
        ]


def _is_number(name: str) -> bool:
    """Whether the optimizer keeps one number of this name for a whole parameter: Adam's count of steps."""
    return name == "step"
