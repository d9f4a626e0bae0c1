"""Division of a checkpoint between ranks that hold the same: each writes a share, which the others need not copy.

torch finds duplicates when it writes, after a save in the background has copied all of them.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from disttrain_trainer.runtime.mesh import World

Path = tuple[str, ...]


def without_others(part: Mapping[str, Any], world: World) -> dict[str, Any]:
    """`part` of a checkpoint, nested dictionaries, less the tensors that a rank with the same ones writes.

    The ranks that have the same stages of a pipeline have the same tensors in it, but for DTensors, which all keep.
    """
    ranks = world.size // world.mesh.pipeline
    writer = writers({path: tensor.nbytes for path, tensor in _tensors(part)}, ranks)
    return _kept(part, (), {path for path, rank in writer.items() if rank != world.rank % ranks})


def writers(sizes: Mapping[Path, int], ranks: int) -> dict[Path, int]:
    """For each name one of 0..ranks - 1, so that all have about as many bytes; the order of `sizes` does not count."""
    loads = [(0, rank) for rank in range(ranks)]
    found = {}
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        load, rank = loads[0]
        found[path] = rank
        heapq.heapreplace(loads, (load + sizes[path], rank))
    return found


def _tensors(part: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from _tensors(value, (*above, name))
        elif isinstance(value, Tensor) and not isinstance(value, DTensor):
            yield (*above, name), value


def _kept(part: Mapping[str, Any], above: Path, left_out: set[Path]) -> dict[str, Any]:
    kept = {}
    for name, value in part.items():
        path = (*above, name)
        if isinstance(value, Mapping):
            inner = _kept(value, path, left_out)
            # One that is empty from the start is content, too.
            if inner or not value:
                kept[name] = inner
        elif path not in left_out:
            kept[name] = value
    return kept
