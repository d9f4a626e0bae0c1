"""`disttrain_trainer.ema:Ema`: a callback that keeps an exponential moving average of the parameters.

It begins with the parameters that training begins with, and after each step it is

    decay * average + (1 - decay) * parameter

in the parameters' own format, rounded after each product and after the sum, whatever part of a parameter a rank holds:
so the average has the same bits in all layouts whose parameters have. (torch's `lerp` may fuse a product and the sum
for some of the elements, and where these stand depends on the part.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_trainer.protocols import Moment
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.local import local_part

ENTRYPOINT = "disttrain_trainer.ema:Ema"
AVERAGE = "average"
"""Key of the averages in the state, which a checkpoint holds by parameter name."""


class Ema:
    """See above. Buffers are not averaged."""

    def __init__(self, decay: float, evaluate: bool = True) -> None:
        """evaluate: whether held-out samples are evaluated with the average. Raises InvalidConfiguration."""
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise InvalidConfiguration(f"{ENTRYPOINT}: `decay` is {decay!r:.40}, expected a number from 0 to below 1")
        self._decay, self._evaluate = decay, evaluate
        self._first_names: dict[str, str] = {}
        """The first name of a parameter, by each of its names: tied ones have several."""
        self._parameters: dict[str, Tensor] = {}
        self._averages: dict[str, Tensor] = {}

    def on_start(self, moment: Moment) -> None:
        """Begin with the present parameters."""
        if not moment.replicas_agree:
            raise InvalidConfiguration(
                f"{ENTRYPOINT} averages the model that all replicas have after each step, and replicas that train alone"
                " (LocalSGD, BMUF) have none: remove it, or use AllReduce"
            )
        every = moment.model.named_parameters(remove_duplicate=False)
        trained = {name: one for name, one in every if one.requires_grad}
        first: dict[nn.Parameter, str] = {}
        self._first_names = {name: first.setdefault(one, name) for name, one in trained.items()}
        self._parameters = {name: parameter.detach() for parameter, name in first.items()}
        self._averages = {name: parameter.clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def on_step(self, moment: Moment) -> None:
        """Take the step's parameters into the average."""
        averages, parameters = _local(self._averages), _local(self._parameters)
        torch._foreach_mul_(averages, self._decay)
        torch._foreach_add_(averages, torch._foreach_mul(parameters, 1 - self._decay))

    def evaluating(self, moment: Moment) -> AbstractContextManager[None]:
        """Return a context in which the model has the average in place of its parameters, where that is asked for."""
        return self._in_place() if self._evaluate else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {AVERAGE: {name: self._averages[first] for name, first in self._first_names.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from it. Raises ValueError where it is of other parameters."""
        stored = state_dict[AVERAGE]
        for name in sorted(stored.keys() ^ self._first_names.keys()):
            raise ValueError(f"{name} is averaged {'there' if name in stored else 'here'} alone")
        for name, average in self._averages.items():
            if stored[name].shape != average.shape:
                raise ValueError(f"{name} has shape {list(stored[name].shape)} there, {list(average.shape)} here")
            average.copy_(stored[name])

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        own = [parameter.clone() for parameter in _local(self._parameters)]
        with torch.no_grad():
            torch._foreach_copy_(_local(self._parameters), _local(self._averages))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(_local(self._parameters), own)


def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return what this rank holds of each tensor."""
    return [local_part(one) for one in tensors.values()]
