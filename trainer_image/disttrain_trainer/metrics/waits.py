"""How long the passes of a model wait for other ranks."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import ProcessGroup, Work
from torch.nn.parallel import DistributedDataParallel

from disttrain_trainer.moe.exchange import Exchange
from disttrain_trainer.parallel.sharded import parameter_groups
from disttrain_trainer.runtime.device import Device, Mark, Span

_WAIT = ("unshard", "wait_for_unshard", "post_backward")
"""Calls of FSDP2 in which a pass waits: for gathered parameters, and for gradients that are being reduced. A module's
own hooks cannot lie around the last."""
_BUFFERS = "_sync_buffers"
"""The call of DDP in which all ranks wait for rank 0's buffers, before a forward pass."""
_Call = Callable[..., Any]


class Waits:
    """Marks the begin and end of each wait. A CPU waits in the call; a GPU does in its stream, where the marks are.

    Marked are FSDP2's calls, DDP's for buffers, the collectives and messages of process groups, the waits for those
    that were begun, and those of functional collectives, which DTensors use. What experts compute for an expert group
    counts as a wait, too: how many tokens a rank is given is the router's choice, and says nothing of the rank.
    """

    def __init__(self, models: nn.Module | list[nn.Module], device: Device) -> None:
        self._device = device
        groups = [group for model in _listed(models) for group in parameter_groups(model)]
        calls = [*((group, name) for group in groups for name in _WAIT), (DistributedDataParallel, _BUFFERS)]
        self.known = all(hasattr(owner, name) for owner, name in calls)
        """Whether this torch has these calls of FSDP2 and DDP, none of which is public."""
        waits = [(Work, "wait"), (functional, "wait_tensor"), *((ProcessGroup, name) for name in _collectives())]
        self._places: list[tuple[Any, str]] = [*calls, *waits]
        self._replaced: list[tuple[Any, str, Any]] = []
        self._spans: list[Span] = []
        self._depth = 0
        self._first: Mark = 0.0
        self._thread = 0

    def begin(self) -> None:
        """Mark waits from now on, those of this thread and of autograd's."""
        self._spans, self._depth, self._thread = [], 0, threading.get_ident()
        for owner, name in self._places:
            self._replace(owner, name, self._marked(getattr(owner, name)))
        self._replace(Exchange, "compute", self._without_experts(Exchange.compute))

    def end(self) -> list[Span]:
        """Mark none from now on; return those since `begin`."""
        while self._replaced:
            owner, name, former = self._replaced.pop()
            if former is None:
                delattr(owner, name)
            else:
                setattr(owner, name, former)
        if self._depth:
            self._depth = 1
            self._leave()
        return self._spans

    def _replace(self, owner: Any, name: str, call: _Call) -> None:
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, call)

    def _marked(self, call: _Call) -> _Call:
        @functools.wraps(call)
        def marked(*arguments: Any, **options: Any) -> Any:
            # What is being compiled would stop at a clock. A thread that saves waits by itself.
            if torch.compiler.is_compiling() or not self._is_of_passes():
                return call(*arguments, **options)
            with self._wait():
                return call(*arguments, **options)

        return marked

    def _without_experts(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def computed(exchange: Exchange, experts: nn.Module, tokens: Tensor, counts: Tensor) -> Tensor:
            with self._wait():
                results = compute(exchange, experts, tokens, counts)
            if results.requires_grad:
                results.register_hook(lambda _: self._enter())
            if tokens.requires_grad:
                tokens.register_hook(lambda _: self._leave())
            return results

        return computed

    @contextmanager
    def _wait(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        """A wait begins, perhaps within another one, which is then marked alone."""
        if not self._depth:
            self._first = self._device.mark()
        self._depth += 1

    def _leave(self) -> None:
        if not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            self._spans.append((self._first, self._device.mark()))

    def _is_of_passes(self) -> bool:
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1


def shares_buffers(model: nn.Module) -> bool:
    """Return whether all ranks wait for rank 0's buffers before each forward pass."""
    return isinstance(model, DistributedDataParallel) and model.will_sync_module_buffers()


def _collectives() -> list[str]:
    """Return the methods of a process group that communicate: which ones there are changes with torch's releases."""
    begin = (
        "all",
        "_all",
        "_reduce",
        "reduce",
        "broadcast",
        "gather",
        "scatter",
        "send",
        "recv",
        "barrier",
        "_end_coa",
    )
    return [name for name in vars(ProcessGroup) if name.startswith(begin)]


def _listed(models: nn.Module | list[nn.Module]) -> list[nn.Module]:
    return [models] if isinstance(models, nn.Module) else models
