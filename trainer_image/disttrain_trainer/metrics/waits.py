"""How long the passes of a sharded model wait for other ranks."""

from collections.abc import Callable
from typing import Any

from torch import nn

from disttrain_trainer.parallel.sharded import parameter_groups
from disttrain_trainer.runtime.device import Device, Span

_WAIT = ("unshard", "wait_for_unshard", "post_backward")
"""Calls of FSDP2 in which a pass waits: for gathered parameters, and for gradients that are being reduced. A module's
own hooks cannot lie around the last."""


class Waits:
    """Marks the begin and end of each wait. A CPU waits in the call; a GPU does in its stream, where the marks are."""

    def __init__(self, model: nn.Module, device: Device) -> None:
        self._groups = parameter_groups(model)
        self._device = device
        self.known = all(hasattr(type(group), name) for group in self._groups for name in _WAIT)
        """Whether this torch's FSDP2 has these calls, none of which is public."""
        self._spans: list[Span] = []

    def begin(self) -> None:
        """Mark waits from now on."""
        self._spans = []
        for group in self._groups:
            for name in _WAIT:
                setattr(group, name, self._marked(getattr(type(group), name).__get__(group)))

    def end(self) -> list[Span]:
        """Mark none from now on; return those since `begin`."""
        for group in self._groups:
            for name in _WAIT:
                delattr(group, name)
        return self._spans

    def _marked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*arguments: Any) -> Any:
            begin = self._device.mark()
            result = call(*arguments)
            self._spans.append((begin, self._device.mark()))
            return result

        return marked
