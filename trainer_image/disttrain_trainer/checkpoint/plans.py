"""torch.distributed.checkpoint's save and load, with plans and results as JSON between the ranks.

`dcp.save` gathers every rank's plan as a pickle, and scatters the global one; `dcp.load` likewise. A rank must not
unpickle what arrives from others (json_collectives.py), so the same steps are done here: planner, writer and reader
are torch's. A load needs no plan of others: each rank reads what it holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from traceback import StackSummary
from typing import Any, Optional, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, StorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadPlanner,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from disttrain_trainer.checkpoint.step_manifest import FileDigest
from disttrain_trainer.checkpoint.step_writer import StepWriter, Written
from disttrain_trainer.runtime.failures import Failure
from disttrain_trainer.runtime.json_collectives import Dtype, gather, scatter
from disttrain_trainer.runtime.mesh import World

T = TypeVar("T")

_Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Whole:
    """A plain value that is saved as it is: torch takes dictionaries and lists apart, and their keys become texts."""

    value: Any


class _SavePlanner(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        """Return what is written of it."""
        return super().transform_object(write_item, value.value if isinstance(value, Whole) else value)


@dataclass(frozen=True)
class _Index:
    """A MetadataIndex."""

    fqn: str
    offset: _Sizes | None
    index: int | None


@dataclass(frozen=True)
class _TensorData:
    """A TensorWriteData; layout and memory format of what is saved are always the same."""

    offsets: _Sizes
    sizes: _Sizes
    dtype: Dtype
    requires_grad: bool
    pin_memory: bool
    size: _Sizes


@dataclass(frozen=True)
class _Item:
    """A WriteItem."""

    index: _Index
    kind: str
    nbytes: int | None
    tensor: _TensorData | None


@dataclass(frozen=True)
class _Plan:
    """A SavePlan."""

    items: list[_Item]
    paths: dict[str, tuple[int | str, ...]]
    """Where in the nested dictionaries each flattened name was."""
    prefix: str | None
    """How the names of this rank's files begin."""


@dataclass(frozen=True)
class _Result:
    """A Written."""

    index: _Index
    size: int
    file: str
    offset: int
    length: int
    digest: FileDigest


def save(contents: dict[str, Any], writer: StepWriter, group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint; called by all ranks of the group together, as dcp.save is.

    Raises CheckpointException on every rank where one fails.
    """
    first = dist.get_rank(group) == 0
    planner = _SavePlanner()
    metadata: list[Metadata] = []

    def plan() -> _Plan:
        writer.reset()
        planner.set_up_planner(state_dict=contents, storage_meta=writer.storage_meta(), is_coordinator=first)
        writer.set_up_storage_writer(first, rank=dist.get_rank(group), use_collectives=True)
        return plan_to_json(writer.prepare_local_plan(planner.create_local_plan()))

    def plan_all(plans: list[_Plan]) -> list[_Plan]:
        together, found = planner.create_global_plan([plan_of_json(one) for one in plans])
        metadata.append(found)
        return [plan_to_json(one) for one in writer.prepare_global_plan(together)]

    def write() -> list[_Result]:
        return [_result_to_json(one) for one in writer.write_data(planner.finish_plan(own), planner).wait()]

    def finish(results: list[list[_Result]]) -> list[None]:
        writer.finish(metadata[0], [[_result_of_json(one) for one in of_rank] for of_rank in results])
        return [None] * len(results)

    own = plan_of_json(_reduce_scatter("plan", plan, _Plan, plan_all, _Plan, group))
    _reduce_scatter("write", write, list[_Result], finish, None, group)


def load(contents: dict[str, Any], reader: StorageReader, planner: LoadPlanner, world: World | None) -> None:
    """Read a checkpoint into `contents`; called by all ranks of the world, if any, together.

    Raises CheckpointException as `save` does.
    """

    def read() -> None:
        with warnings.catch_warnings():
            # That each rank reads by itself is what is wanted.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            try:
                dcp.load(contents, storage_reader=reader, planner=planner, no_dist=True)
            except CheckpointException as error:
                cause, _ = next(iter(error.failures.values()))
                raise cause from error

    failure, _ = _attempt(read)
    found = [failure] if world is None else world.gather(failure, Failure | None)
    _raise("read", {rank: one for rank, one in enumerate(found) if one is not None})


def plan_to_json(plan: SavePlan) -> _Plan:
    """Return the plan as it travels. Raises ValueError for a tensor that is neither dense nor contiguous."""
    prefix = plan.storage_data.prefix if isinstance(plan.storage_data, _StoragePrefix) else None
    return _Plan([_item_to_json(item) for item in plan.items], dict(plan.planner_data or {}), prefix)


def plan_of_json(plan: _Plan) -> SavePlan:
    """Return torch's plan of one that has travelled."""
    prefix = None if plan.prefix is None else _StoragePrefix(plan.prefix)
    return SavePlan([_item_of_json(item) for item in plan.items], storage_data=prefix, planner_data=plan.paths)


def _item_to_json(item: WriteItem) -> _Item:
    found = item.tensor_data
    tensor = None
    if found is not None:
        properties = found.properties
        if properties.layout != torch.strided or properties.memory_format != torch.contiguous_format:
            raise ValueError(f"`{item.index.fqn}` is not dense and contiguous: a checkpoint holds no such tensors")
        offsets, sizes = tuple(found.chunk.offsets), tuple(found.chunk.sizes)
        flags = (properties.requires_grad, properties.pin_memory)
        tensor = _TensorData(offsets, sizes, properties.dtype, *flags, tuple(found.size))
    nbytes = None if item.bytes_io_data is None else item.bytes_io_data.nbytes
    return _Item(_index_to_json(item.index), item.type.name, nbytes, tensor)


def _item_of_json(item: _Item) -> WriteItem:
    tensor = None
    if item.tensor is not None:
        found = item.tensor
        properties = TensorProperties(dtype=found.dtype, requires_grad=found.requires_grad, pin_memory=found.pin_memory)
        chunk = ChunkStorageMetadata(torch.Size(found.offsets), torch.Size(found.sizes))
        tensor = TensorWriteData(chunk, properties, torch.Size(found.size))
    nbytes = None if item.nbytes is None else BytesIOWriteData(item.nbytes)
    return WriteItem(_index_of_json(item.index), WriteItemType[item.kind], nbytes, tensor)


def _index_to_json(index: MetadataIndex) -> _Index:
    return _Index(index.fqn, None if index.offset is None else tuple(index.offset), index.index)


def _index_of_json(index: _Index) -> MetadataIndex:
    return MetadataIndex(index.fqn, index.offset, index.index)


def _result_to_json(result: Written) -> _Result:
    place: _StorageInfo = result.storage_data
    index = _index_to_json(result.index)
    return _Result(index, result.size_in_bytes, place.relative_path, place.offset, place.length, result.digest)


def _result_of_json(result: _Result) -> Written:
    place = _StorageInfo(result.file, result.offset, result.length)
    return Written(_index_of_json(result.index), result.size, place, result.digest)


def _reduce_scatter(
    step: str,
    own: Callable[[], Any],
    kind: Any,
    reduce: Callable[[list[Any]], Sequence[Any]],
    result_kind: Any,
    group: dist.ProcessGroup | None,
) -> Any:
    """Return this rank's part of what `reduce`, on the group's first rank, makes of what `own` returns on all ranks.

    Raises CheckpointException on every rank where one of them fails.
    """
    found = gather(_attempt(own), tuple[Failure | None, Optional[kind]], group)  # noqa: UP045
    answers: list[tuple[dict[int, Failure], Any]] = []
    if found:
        failures = {rank: failure for rank, (failure, _) in enumerate(found) if failure is not None}
        results: Sequence[Any] | None = None
        if not failures:
            failure, results = _attempt(lambda: reduce([value for _, value in found]))
            failures = {} if failure is None else {0: failure}
        answers = [({}, result) for result in results] if results is not None else [(failures, None)] * len(found)
    failures, result = scatter(answers, tuple[dict[int, Failure], Optional[result_kind]], group)  # noqa: UP045
    _raise(step, failures)
    return result


def _attempt(work: Callable[[], T]) -> tuple[Failure | None, T | None]:
    try:
        return None, work()
    except Exception as error:
        return Failure.of(error), None


def _raise(step: str, failures: dict[int, Failure]) -> None:
    if failures:
        raise CheckpointException(step, {rank: (one.error(), StackSummary()) for rank, one in failures.items()})
