"""Which rank of a session is slow: what each does by itself in a step, in steps that all of them look at together.

That is the time in which the session's loaders read, and that of the forward and backward passes of models that it has
prepared, without the waits for other ranks that lie within.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_iter

from disttrain_api.report import SlowRank
from disttrain_trainer.metrics.stragglers import Stragglers, say
from disttrain_trainer.metrics.waits import Waits
from disttrain_trainer.runtime.device import Device, Span
from disttrain_trainer.runtime.mesh import World

APART_SECONDS = 1.0
"""The least between the begins of two steps that are looked at."""
_UNKNOWN = -1.0


class Seconds(NamedTuple):
    """What a rank has done by itself in a step; below 0: not known."""

    loading: float = _UNKNOWN
    passes: float = _UNKNOWN


@dataclass
class Judge:
    """Names the slow rank on rank 0. ranks: of the job; pod: of each pod."""

    ranks: int
    pod: int
    device: Device
    named: Callable[[SlowRank | None], None]
    """Told of each change."""
    clock: Callable[[], float] = time.monotonic
    due: float = 0.0
    """Moment from which on another step is looked at."""
    _stragglers: Stragglers = field(init=False)
    _steps: int = 0
    _since: float = 0.0

    def __post_init__(self) -> None:
        # A script may have ranks wait in ways that nobody sees, so each rank is compared with all that are elsewhere.
        everyone = [range(self.ranks)]
        self._stragglers = Stragglers(everyone, everyone, self.pod)
        self._since = self.clock()

    @property
    def wants(self) -> bool:
        """Whether the next step is to be looked at."""
        return self.clock() >= self.due

    def step(self, looks_on: bool, found: Sequence[Seconds]) -> None:
        """Count a step. looks_on: whether the next one is looked at. found: of each rank, if this one was."""
        self._steps += 1
        now = self.clock()
        if looks_on:
            self.due = now + APART_SECONDS
        if not found:
            return
        steps, seconds, self._steps, self._since = self._steps, now - self._since, 0, now
        if any(one.loading < 0 for one in found):
            return
        # What one rank does not know of itself is not compared with what others know.
        passes = [one.passes for one in found] if all(one.passes >= 0 for one in found) else [0.0] * len(found)
        own = [self.device.seconds_of_both(one.loading, more) for one, more in zip(found, passes, strict=True)]
        former = self._stragglers.found
        if self._stragglers.take(own, steps, seconds):
            print(say(self._stragglers.found), flush=True)
        if self._stragglers.found != former:
            self.named(self._stragglers.found)


class OwnTime:
    """Times this rank's part of the steps that are looked at. placed: whether the operator would find its pod."""

    def __init__(self, world: World, *, placed: bool) -> None:
        self._world, self._device, self._placed = world, world.device, placed
        self._models: list[nn.Module] = []
        self._waits: Waits | None = None
        self._looks = self._ends = False
        self._begin: Any = None
        self._loading = 0.0
        self._spans: list[tuple[Span, Sequence[Span]]] = []

    def watch(self, model: nn.Module) -> None:
        """Time the passes of a model that the session has prepared."""
        self._models.append(model)
        self._waits = Waits(self._models, self._device)
        model.register_forward_pre_hook(self._passes_begin)
        model.register_forward_hook(self._passes_end)

    def look(self, *, looks: bool) -> None:
        """A step begins; looks: at this one."""
        self._end_passes()
        self._looks, self._loading, self._spans = looks, 0.0, []

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within the block this rank reads samples."""
        begin = time.monotonic()
        yield
        self._loading += time.monotonic() - begin

    def seconds(self) -> list[float]:
        """Return this rank's `Seconds` at its index among those of all ranks, else 0; nothing in other steps."""
        if not self._looks:
            return []
        if self._begin is not None:
            # No backward pass has ended it.
            self._end_passes()
            self._spans.pop()
        everyone = [0.0] * (len(Seconds._fields) * self._world.size)
        at = len(Seconds._fields) * self._world.rank
        everyone[at : at + len(Seconds._fields)] = self._found() if self._placed else Seconds()
        return everyone

    def _found(self) -> Seconds:
        seen = self._waits is not None and self._waits.known and not any(map(_is_compiled, self._models))
        if not (self._spans and seen) or _has_groups(self._world):
            return Seconds(self._loading)
        self._device.synchronize()
        passes = sum(
            self._device.seconds(*span) - sum(self._device.seconds(*wait) for wait in waits)
            for span, waits in self._spans
        )
        return Seconds(self._loading, max(0.0, passes))

    def _passes_begin(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._looks or self._begin is not None or not torch.is_grad_enabled():
            return
        assert self._waits is not None
        self._waits.begin()
        self._begin, self._ends = self._device.mark(), False

    def _passes_end(self, _model: nn.Module, _inputs: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or self._begin is None:
            return
        for output in tree_iter(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._queue_end)

    def _queue_end(self, _: Tensor) -> None:
        # Before DDP queues its own callback, which waits for the other ranks.
        if self._begin is not None and not self._ends:
            self._ends = True
            Variable._execution_engine.queue_callback(self._end_passes)

    def _end_passes(self) -> None:
        if self._begin is not None and self._waits is not None:
            waits, begin, self._begin = self._waits.end(), self._begin, None
            self._spans.append(((begin, self._device.mark()), waits))


def read(values: Sequence[float]) -> list[Seconds]:
    """Return what each rank has said, of the sums over `OwnTime.seconds`."""
    width = len(Seconds._fields)
    return [Seconds(*values[at : at + width]) for at in range(0, len(values), width)]


def _is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model is compiled: what waits in it is not seen."""
    # torch.compile(model) is a module around the model, which it calls so; model.compile() leaves it in its place.
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in model.modules())


def _has_groups(world: World) -> bool:
    """Whether there is a group of some of the ranks that the session has not made: they may do other work than the
    others, in a layout of the script's own."""
    known = {groups for axis in ("replicate", "shard") for groups in world.mesh.groups(axis)}
    found = (tuple(sorted(ranks)) for ranks in dist.distributed_c10d._world.pg_group_ranks.values())
    return any(1 < len(ranks) < world.size and ranks not in known for ranks in found)
