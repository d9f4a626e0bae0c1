"""One pull of a worker, of which the buckets come in while the forward pass goes on.

Servers send the numbers of one version in the order in which the worker asks for them, which is that of the model. A
torch function that is given a parameter waits until its bucket is there; so does the forward pass of the module that
has it, for kernels that torch knows nothing of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from disttrain_trainer.parameter_server.protocol.placement import Placement
from disttrain_trainer.parameter_server.protocol.wire import Message
from disttrain_trainer.parameter_server.worker.payload import numbers

Receive = Callable[[int], Message]
"""The next bucket that a server has sent."""


@dataclass(frozen=True)
class Pulled:
    """Received with the parameters of all servers: per server its version and the number of accepted parts."""

    versions: list[int]
    taken: list[int]
    squares: dict[int, float]
    """Sum of squares of the whole gradient of the last steps, by step; only where steps are updated as a whole."""


class Pulling:
    """A pull that was asked for; `pulled` is known from the start, as the first bucket of each server says it."""

    def __init__(
        self,
        placement: Placement,
        parameters: Mapping[str, nn.Parameter],
        asked: Sequence[Iterable[int]],
        receive: Receive,
    ) -> None:
        """`asked`: the ranges of each server that will come."""
        self._receive = receive
        self._places: dict[str, list[tuple[int, int]]] = {}
        # Not the parameters themselves: that they are used is watched, and that they change is not autograd's matter.
        self._missing: list[dict[int, Tensor]] = [{} for _ in placement]
        for server, ranges in enumerate(asked):
            for index in ranges:
                segment = placement[server][index]
                self._missing[server][index] = numbers(parameters[segment.name].data, segment)
                self._places.setdefault(segment.name, []).append((server, index))
        self.pulled = _pulled([self._take(server) for server in range(len(placement))])

    def need(self, name: str) -> None:
        """Back when all numbers of the parameter are those of the servers."""
        for server, index in self._places.pop(name, ()):
            while index in self._missing[server]:
                self._take(server)

    def rest(self) -> None:
        """Back when all have come."""
        for server, missing in enumerate(self._missing):
            while missing:
                self._take(server)
        self._places = {}

    @property
    def waits_for(self) -> Iterable[str]:
        """Names of parameters that may not be there yet."""
        return self._places

    def _take(self, server: int) -> Message:
        message = self._receive(server)
        for index, values in zip(message.numbers("ranges"), message.tensors, strict=True):
            # A server that was asked twice answers twice, and what has been computed with is not to change.
            if (target := self._missing[server].pop(index, None)) is not None:
                target.copy_(values)
        return message


def _pulled(firsts: Sequence[Message]) -> Pulled:
    squares: dict[int, float] = {}
    for first in firsts:
        for step, square in first.fields["squares"].items():
            squares[int(step)] = squares.get(int(step), 0.0) + square
    return Pulled([first.number("version") for first in firsts], [first.number("taken") for first in firsts], squares)


def can_wait(model: nn.Module) -> bool:
    """Whether all that the model computes is seen call by call, and not compiled."""
    return not any(
        isinstance(one, torch.jit.ScriptModule)
        or getattr(one, "_compiled_call_impl", None) is not None
        or hasattr(one, "_orig_mod")
        for one in model.modules()
    )


@contextmanager
def arriving(model: nn.Module, waits_for: Iterable[str], need: Callable[[str], None]) -> Iterator[None]:
    """In the model's first forward pass, calls `need` with a parameter's name before it is used.

    waits_for: names of the model's parameters. What the pass did not use is needed when it ends.
    """
    named = dict(model.named_parameters())
    wanted = {named[name]: name for name in waits_for}
    waiting = _Waiting(wanted, need)
    # A parameter's owner alone does not say when it is used: MultiheadAttention calls no forward of its projection.
    owners = [one for one in model.modules() if any(parameter in wanted for parameter in one.parameters(False))]
    hooks = [
        # Ahead of others' hooks, which may use parameters, too: spectral normalisation does.
        *(
            one.register_forward_pre_hook(lambda one, _: waiting.for_all(one.parameters(False)), prepend=True)
            for one in owners
        ),
        model.register_forward_pre_hook(lambda *_: waiting.begin(), prepend=True),
        model.register_forward_hook(lambda *_: waiting.complete()),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        waiting.end()


class _Waiting(TorchFunctionMode):
    """Sees every torch function that is called between `begin` and `end`."""

    def __init__(self, wanted: dict[nn.Parameter, str], need: Callable[[str], None]) -> None:
        super().__init__()
        self._wanted, self._need = wanted, need
        self._on = False

    def begin(self) -> None:
        if self._wanted and not self._on:
            self._on = True
            self.__enter__()

    def complete(self) -> None:
        self.end()
        self.for_all(list(self._wanted))

    def end(self) -> None:
        if self._on:
            self._on = False
            self.__exit__(None, None, None)

    def for_all(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter) and (name := self._wanted.pop(tensor, None)) is not None:
                self._need(name)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._wanted:
            self.for_all(tree_iter((args, kwargs)))
        return func(*args, **(kwargs or {}))
