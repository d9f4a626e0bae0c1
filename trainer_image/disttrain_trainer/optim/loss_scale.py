"""Loss scaling for FP16, whose small gradients would vanish (Micikevicius et al. 2018, "Mixed Precision Training",
section 3.2), with the numbers of torch.amp.GradScaler.

Its verdict on a step is the norm of the whole gradient, which is alike on every rank: one that holds a part of it does
not see an overflow in the parts of others.

It falls to 1, as Megatron's and DeepSpeed's do. A gradient that is not finite there owes that to no scale.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disttrain_trainer.parallel.gradient_norm import local_values

_BACKOFF, _GROWTH = 0.5, 2.0
_LEAST = 1.0
_INTERVAL = 2000
"""Steps without an overflow after which the scale grows."""


@dataclass
class LossScaler:
    """The loss scale, and the number of steps in a row with it."""

    scale: float = 2.0**16
    steps: int = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give the gradients their true size."""
        held = [local_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
        # A stage that is not trained has none.
        if held:
            torch._foreach_mul_(held, 1 / self.scale)

    @property
    def may_fall(self) -> bool:
        """Whether a gradient that is not finite may be so by the scale alone."""
        return self.scale > _LEAST

    def step(self, optimizer: torch.optim.Optimizer, norm: float) -> None:
        """Step the optimizer, but where the gradient's norm says that it overflowed; then the scale falls instead."""
        if not math.isfinite(norm):
            self.scale, self.steps = max(_LEAST, self.scale * _BACKOFF), 0
            return
        optimizer.step()
        self.steps += 1
        if self.steps == _INTERVAL:
            self.scale, self.steps = self.scale * _GROWTH, 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, under torch's names."""
        return {"scale": self.scale, "_growth_tracker": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`."""
        self.scale, self.steps = float(state["scale"]), int(state["_growth_tracker"])
