"""Which layers a rank gathers, and in which order: shards need the same on all ranks, or they mix layers, or wait.

Each rank notes what it calls. A digest of a step's notes goes with the sum that every step makes, and where digests
differ, ranks show each other their notes. Where ranks gather unlike numbers of layers none gets that far: see
checks/layer_watch.py.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from disttrain_trainer.parallel.expert import expert_layers
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World

_BITS = 20
"""A digest has so many: the sum of the squares of 8,192 of them is exact in float64."""
_MOST_NOTES = 20_000
"""A step has no more. Evaluations may make any number of passes, and what follows counts in the digest alone."""
_END_OF_PASS, _END_OF_STEP = -1, -2


@dataclass(frozen=True)
class Notes:
    """Calls of a rank in its current step and in the one before; `done`: steps before."""

    done: int
    current: Sequence[int]
    last: Sequence[int]


class LayerOrder:
    """The units of a model that FSDP2 has cut, and the parameters without a gradient, as they are met in a step."""

    def __init__(self, model: nn.Module) -> None:
        # Ranks hold experts of their own, which all compute whatever tokens come.
        apart = {part for layer in expert_layers(model) for part in layer.experts.modules()}
        shared = [(name, part) for name, part in model.named_modules() if part not in apart]
        cut = {name for name, part in shared if isinstance(part, FSDPModule)}
        units = [(name, part) for name, part in shared if name in cut]
        self._names = [f"`{name}`" if name else "the model" for name, _ in units]
        self._parameters = {
            f"{name}.{key}".lstrip("."): parameter
            for name, part in shared
            for key, parameter in part.named_parameters(recurse=False)
            if parameter.requires_grad
        }
        self._lock = threading.Lock()
        self._done, self._crc = 0, 0
        self._current: list[int] = []
        self._last: list[int] = []
        for number, (_, unit) in enumerate(units):
            unit.register_forward_pre_hook(self._noting(number), prepend=True)
        model.register_forward_hook(self._noting(_END_OF_PASS))

    @classmethod
    def of(cls, model: nn.Module, world: World) -> LayerOrder | None:
        """The order of a model that is cut over several ranks; None of any other."""
        return cls(model) if isinstance(model, FSDPModule) and world.size > 1 and world.mesh.pipeline == 1 else None

    @property
    def notes(self) -> Notes:
        """Return the notes so far; any thread may call it."""
        with self._lock:
            return Notes(self._done, list(self._current), list(self._last))

    def end_pass(self) -> None:
        """Note which parameters have no gradient, after all that there will be in this step."""
        for number, parameter in enumerate(self._parameters.values()):
            if parameter.grad is None:
                self._note(len(self._names) + number)

    def take(self) -> tuple[float, float]:
        """The digest of what was noted since this was last asked, and its square: to be summed over all ranks."""
        self._note(_END_OF_STEP)
        digest = self._crc >> (32 - _BITS)
        with self._lock:
            self._done, self._last, self._current, self._crc = self._done + 1, self._current, [], 0
        return float(digest), float(digest**2)

    def require_alike(self, sums: Sequence[float], world: World) -> None:
        """Raises InvalidConfiguration, on all ranks, where the digests that were taken last differ. Collective then.

        sums: over all ranks, of what `take` has returned.
        """
        total, squares = sums
        if int(squares) * world.size == int(total) ** 2:
            return
        found = world.gather(self._last, list[int])
        sentence = next(
            (difference for rank, notes in enumerate(found) if (difference := self.unlike(0, found[0], rank, notes))),
            "",
        )
        error = InvalidConfiguration(sentence or _sentence("rank 0 calls other layers than another rank"))
        error.on_every_rank = True
        raise error

    def unlike(self, rank: int, notes: Sequence[int], other: int, others: Sequence[int]) -> str | None:
        """Return the first note in which two ranks differ; None if one is only further ahead."""
        for one, another in zip(notes, others, strict=False):
            if one != another:
                return _sentence(f"rank {rank} {self._describe(one)} where rank {other} {self._describe(another)}")
        return None

    def _describe(self, note: int) -> str:
        if note < 0:
            return "ends its forward pass" if note == _END_OF_PASS else "ends its step"
        if note < len(self._names):
            return f"calls {self._names[note]}"
        names = list(self._parameters)
        return f"has no gradient of `{names[min(note - len(self._names), len(names) - 1)]}`"

    def _noting(self, number: int) -> Callable[..., None]:
        # A compiler is to leave it alone, as FSDP2's own hooks.
        return torch.compiler.disable(lambda *_: self._note(number))  # type: ignore[no-any-return]

    def _note(self, number: int) -> None:
        self._crc = zlib.crc32(array("q", [number]), self._crc)
        if len(self._current) < _MOST_NOTES:
            self._current.append(number)


def difference(order: LayerOrder, own: Notes, rank: int, first: Notes) -> str | None:
    """Return the certain difference between the calls of rank `rank` and rank 0."""
    if own.done == first.done:
        pairs = [(own.last, first.last), (own.current, first.current)]
    elif own.done == first.done + 1:
        pairs = [(own.last, first.current)]
    elif own.done + 1 == first.done:
        pairs = [(own.current, first.last)]
    else:
        return None
    return next((difference for ours, theirs in pairs if (difference := order.unlike(0, theirs, rank, ours))), None)


def _sentence(what: str) -> str:
    return (
        f"`training.model`: {what}: shards gather a layer from all ranks, which must use the same layers in the same "
        "order; draw what is left out alike on all ranks (a generator of its own with one seed), or use replicas"
    )
