"""A model in whose ranks a step that would wait for a GPU raises an error: the CPU stands for one.

What a GPU would hold is marked: parameters, buffers, what `on_device` moves, and all that is computed of these. Calls
that look at its values are those that wait.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from disttrain_trainer.data import batches
from disttrain_trainer.strategies.synchronous import Synchronous
from tests.unit.trainer.user_code import double_mlp

ATEN = torch.ops.aten
OPERATORS = {
    ATEN._local_scalar_dense.default,
    ATEN.equal.default,
    ATEN.is_nonzero.default,
    ATEN.masked_select.default,
    ATEN.nonzero.default,
    ATEN._unique2.default,
    ATEN.unique_consecutive.default,
    ATEN.unique_dim.default,
}
METHODS = {"cpu", "item", "numpy", "tolist", "__array__", "__bool__", "__float__", "__index__", "__int__"}


class Marked:
    """Memory that a GPU would hold."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.UntypedStorage] = {}

    def add(self, values: Any) -> None:
        # The storages are kept for the step: else other tensors would come to lie where they were.
        self._kept |= {storage._cdata: storage for storage in _storages(values)}

    def has(self, values: Any) -> bool:
        return any(storage._cdata in self._kept for storage in _storages(values))


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            yield (value._local_tensor if isinstance(value, DTensor) else value).untyped_storage()


class Operators(TorchDispatchMode):
    """Marks what is computed of marked memory, and notes what would wait for it."""

    def __init__(self, marked: Marked, found: list[str]) -> None:
        super().__init__()
        self._marked, self._found = marked, found

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        given = (arguments, options or {})
        marked = self._marked.has(given)
        if marked and function in OPERATORS:
            self._found.append(_at(str(function)))
        found = function(*arguments, **(options or {}))
        if marked:
            self._marked.add((found, given))
        return found


class Methods(TorchFunctionMode):
    """Notes calls that look at marked memory without an operator."""

    def __init__(self, marked: Marked, found: list[str]) -> None:
        super().__init__()
        self._marked, self._found = marked, found

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if getattr(function, "__name__", "") in METHODS and self._marked.has(arguments[:1]):
            self._found.append(_at(resolve_name(function) or function.__name__))
        return function(*arguments, **(options or {}))


def _at(name: str) -> str:
    ours = [frame for frame in traceback.extract_stack() if "disttrain_trainer" in frame.filename]
    return f"{name} at {ours[-1].filename}:{ours[-1].lineno}" if ours else name


@contextmanager
def _without_waits(state: Any, microbatches: Any) -> Iterator[None]:
    marked, found, moved = Marked(), [], batches._moved
    marked.add([list(state.module.parameters()), list(state.module.buffers())])
    marked.add([[one.batch, one.weights] for one in microbatches])

    def mark(values: Tensor, device: torch.device) -> Tensor:
        there = moved(values, device)
        marked.add(there)
        return there

    batches._moved = mark
    try:
        with Operators(marked, found), Methods(marked, found):
            yield
    finally:
        batches._moved = moved
    if found:
        raise RuntimeError(f"this step would wait for a GPU: {', '.join(found)}")


def checked_mlp(waits: bool = False) -> nn.Module:
    """The model; with `waits` one that looks at its outputs."""
    step = Synchronous._step

    def checked(strategy: Synchronous, batch: Any, *arguments: Any) -> Any:
        with _without_waits(strategy.state, batch.microbatches):
            return step(strategy, batch, *arguments)

    Synchronous._step = checked  # type: ignore[method-assign]
    model = double_mlp()
    if waits:
        model[1].register_forward_hook(lambda _, inputs, outputs: outputs * float(outputs.max() > -2))
    return model
