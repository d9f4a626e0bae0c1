"""The shard of one server: ranges of the flattened parameters, and torch's optimizer over them.

SGD, Adam and AdamW treat every number by itself, so parameters cut into ranges are updated as whole ones are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from disttrain_api.training import Optimizer
from disttrain_trainer.optim.optimizers import build_optimizer
from disttrain_trainer.parameter_server.protocol.rows import Rows
from disttrain_trainer.parameter_server.server.row_updates import no_state, update_rows

OptimizerState = Mapping[str, Tensor]
"""By name: a tensor as long as the range, or one number."""


class Shard:
    """The numbers of some ranges and their optimizer; `version` counts the updates."""

    def __init__(
        self,
        values: Sequence[Tensor],
        settings: Optimizer,
        states: Sequence[OptimizerState] = (),
        widths: Sequence[int] = (),
    ) -> None:
        """`values`: [length] of each range, which are copied; `states`: the optimizer's state of each, if any.

        `widths`: of each range the numbers of a row where it holds rows of a table, else 0.
        """
        self.widths = list(widths) or [0] * len(values)
        self._settings = settings
        self.version = 0
        self._parameters = [nn.Parameter(value.clone()) for value in values]
        self._optimizer = build_optimizer(settings, self._parameters) if self._parameters else None
        for parameter, state in zip(self._parameters, states, strict=False):
            if state and self._optimizer is not None:
                self._optimizer.state[parameter] = {
                    name: value.clone() if len(value) == len(parameter) and not _is_number(name) else value[0].clone()
                    for name, value in state.items()
                }
        self._copies: dict[int, Tensor] = {}

    @property
    def lengths(self) -> list[int]:
        return [len(parameter) for parameter in self._parameters]

    @property
    def formats(self) -> list[torch.dtype]:
        return [parameter.dtype for parameter in self._parameters]

    def values(self, ranges: Iterable[int] | None = None) -> list[Tensor]:
        """A copy of the numbers of all or some ranges, made once per version: it is still being sent when the next
        update comes."""
        found = []
        for index in range(len(self._parameters)) if ranges is None else ranges:
            if index not in self._copies:
                self._copies[index] = self._parameters[index].detach().clone()
            found.append(self._copies[index])
        return found

    def rows(self, index: int, places: Tensor) -> Tensor:
        """[n x width] numbers of some rows [n] of a range that holds a table."""
        return self._parameters[index].detach().view(-1, self.widths[index])[places].view(-1)

    def update(self, gradients: Mapping[int, Tensor | Rows], rate: float) -> float | None:
        """One step of the optimizer. `gradients`: of each range that has one. Returns the sum of their squares."""
        square = 0.0
        for index, parameter in enumerate(self._parameters):
            gradient = gradients.get(index)
            if gradient is None:
                continue
            dense = gradient.values if isinstance(gradient, Rows) else gradient
            square += float(torch.linalg.vector_norm(dense, dtype=torch.float64)) ** 2
            if isinstance(gradient, Rows):
                update_rows(self._settings, rate, parameter.detach(), self._state(index), gradient)
            else:
                parameter.grad = gradient
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._changed()
        return square

    def _changed(self) -> None:
        self.version += 1
        self._copies = {}

    def _state(self, index: int) -> dict[str, Tensor]:
        """The optimizer's state of a range, zeros where it has none yet."""
        assert self._optimizer is not None
        parameter = self._parameters[index]
        if not self._optimizer.state.get(parameter):
            self._optimizer.state[parameter] = no_state(self._settings, parameter.detach())
        return self._optimizer.state[parameter]

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
