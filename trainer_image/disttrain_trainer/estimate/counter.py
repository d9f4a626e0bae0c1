"""What a rank computes and sends: floating-point operations and collectives, counted as they are dispatched."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from disttrain_trainer.runtime.mesh import World

SEND = "send-recv"
# The beginning of an operator's name without underscores; names of operations are those of `disttrain collectives`.
_OPERATIONS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "sharddimalltoall": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": SEND,
}
_NAMESPACES = ("c10d::", "_c10d_functional::", "_dtensor::")


def _grouped_flop(one: Tensor, other: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Those of the products of each group's matrices."""
    if one.dim() == other.dim() == 2:
        return 2 * one.numel() * other.shape[-1]
    return 2 * out_val.numel() * one.shape[-1]


# torch's own table has those of GPUs alone.
_FLOPS: Mapping[Any, Any] = flop_registry | {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
    torch.ops.aten._grouped_mm: _grouped_flop,
}

Key = tuple[str, tuple[int, ...]]
"""An operation, and the global ranks that take part."""


@dataclass(frozen=True)
class Message:
    """All calls of one operation in groups along one axis of the mesh, in a step."""

    operation: str
    axis: str
    """`world` where it is the whole job."""
    ranks: int
    """Ranks of the group."""
    within_pod: bool
    """Whether all of them are in one pod."""
    calls: float
    bytes: float
    """Size of the larger of a rank's two buffers, summed over the calls."""
    every: int = 1
    """Steps from one to the next."""


@dataclass
class Count:
    """What a part of a step computes and sends."""

    flops: float = 0.0
    calls: dict[Key, tuple[float, float]] = field(default_factory=dict)
    """How often, and bytes of the larger of a rank's two buffers."""

    def add(self, key: Key, calls: float, size: float) -> None:
        """Add calls of one operation."""
        before = self.calls.get(key, (0.0, 0.0))
        self.calls[key] = before[0] + calls, before[1] + size

    def plus(self, other: "Count", times: float = 1.0) -> "Count":
        """Return the sum of this and so many times the other."""
        total = Count(self.flops + times * other.flops, dict(self.calls))
        for key, (calls, size) in other.calls.items():
            total.add(key, times * calls, times * size)
        return total


class WorkCounter(TorchDispatchMode):
    """Counts what happens inside. Who only receives counts nothing: the sender does."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = False
        self._count = Count()

    def take(self) -> Count:
        """Return what was counted since the last call."""
        found, self._count = self._count, Count()
        return found

    def add(self, operation: str, ranks: tuple[int, ...], size: int, calls: int = 1) -> None:
        """Count what is not called here; size: of all calls."""
        self._count.add((operation, ranks), calls, size)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing of what is called inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count, but not how DTensor finds the shape of a result the first time: by the operation on whole tensors."""
        original = ShardingPropagator._propagate_tensor_meta_non_cached

        def uncounted(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return original(*args, **kwargs)

        ShardingPropagator._propagate_tensor_meta_non_cached = uncounted  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            ShardingPropagator._propagate_tensor_meta_non_cached = original  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What a DTensor does with its local part comes here, too.
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if self._paused:
            return result
        flops = _FLOPS.get(func._overloadpacket)
        if flops is not None:
            self._count.flops += flops(*args, **(kwargs or {}), out_val=result)
        operation = operation_of(func._schema.name)
        if operation is not None:
            size = max(_bytes(part) for part in (*args, result))
            self.add(operation, tuple(dist.get_process_group_ranks(_group_of(args))), size)
        return result


def operation_of(name: str) -> str | None:
    """`c10d::_allgather_base_` -> "all-gather"; None for what sends nothing, or only receives."""
    if not name.startswith(_NAMESPACES):
        return None
    plain = name.partition("::")[2].replace("_", "")
    return next((operation for start, operation in _OPERATIONS.items() if plain.startswith(start)), None)


def messages(count: Count, world: World, ranks_per_pod: int, every: int = 1) -> list[Message]:
    """Return what was counted by operation, axis and size of the group, the most bytes first."""
    axes = _axes(world)
    merged: dict[tuple[str, str, int, bool], tuple[float, float]] = {}
    for (operation, ranks), (calls, size) in count.calls.items():
        if len(ranks) > 1:
            within = len({rank // ranks_per_pod for rank in ranks}) == 1
            key = operation, axes.get(ranks, "world" if len(ranks) == world.size else "other"), len(ranks), within
            before = merged.get(key, (0.0, 0.0))
            merged[key] = before[0] + calls, before[1] + size
    found = [Message(*key, calls, size, every) for key, (calls, size) in merged.items()]
    return sorted(found, key=lambda one: -one.bytes)


def _axes(world: World) -> dict[tuple[int, ...], str]:
    """The axis of each group of the mesh that this rank is in; neighbours in a pipeline are two of its ranks."""
    found: dict[tuple[int, ...], str] = {}
    if world.context is not None:
        found[tuple(dist.get_process_group_ranks(world.context))] = "context"
    for axis in world.device_mesh.mesh_dim_names or ():
        ranks = tuple(dist.get_process_group_ranks(world.device_mesh.get_group(axis)))
        found.setdefault(ranks, axis)
        if axis == "pipeline":
            found |= {tuple(sorted((one, other))): axis for one in ranks for other in ranks if one != other}
    return found


def _group_of(args: Any) -> dist.ProcessGroup:
    """The group of a call: c10d's operators take it before any other object, functional ones its name at last."""
    for one in args:
        if isinstance(one, torch.ScriptObject):
            return dist.ProcessGroup.unbox(one)
    return torch._C._distributed_c10d._resolve_process_group(args[-1])


def _bytes(part: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)]
    return sum(prod(tensor.shape) * tensor.element_size() for tensor in tensors)
