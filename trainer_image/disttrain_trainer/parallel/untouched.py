"""Restores a model's state besides its parameters after passes that do not count."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import nn


class Untouched:
    """Copies of the buffers and the extra state of modules, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
        self._extra = [(one, copy.deepcopy(one.get_extra_state())) for one in with_extra_state(modules)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the modules what they were."""
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for module, before in self._extra:
            module.set_extra_state(before)


def with_extra_state(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules that have extra state, those inside others included."""
    for module in modules:
        yield from (one for one in module.modules() if type(one).get_extra_state is not nn.Module.get_extra_state)
