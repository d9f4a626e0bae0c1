"""torch's checkpoint reader for safetensors files: each rank reads only the part that it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from disttrain_trainer.checkpoint.file_part import FilePart
from disttrain_trainer.checkpoint.safetensors_file import StoredTensor
from disttrain_trainer.checkpoint.safetensors_index import read_files
from disttrain_trainer.runtime.errors import CheckpointBroken, shown


class _Stored(NamedTuple):
    """A tensor of a file."""

    name: str
    file: Path
    described: StoredTensor


class _Piece(NamedTuple):
    """What a tensor of a file is of a parameter."""

    stored: _Stored
    offsets: torch.Size
    sizes: torch.Size


class SafetensorsReader(FileSystemReader):
    """Reads a safetensors file or all files of an index."""

    def __init__(self, path: Path, part_of: Callable[[str], FilePart | None] = FilePart) -> None:
        """part_of: what a tensor of the files is in the model; None: nothing, so that it is not read."""
        super().__init__(str(path))
        self._path, self._part_of = path, part_of

    def read_metadata(self) -> Metadata:
        """Return what stands where. Raises CheckpointBroken as `read_files`, and for parts that make no parameter."""
        entries: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, _Stored] = {}
        for parameter, pieces in self._pieces():
            chunks = [ChunkStorageMetadata(piece.offsets, piece.sizes) for piece in pieces]
            last, first = chunks[-1], pieces[0].stored
            size = torch.Size(at + length for at, length in zip(last.offsets, last.sizes, strict=True))
            entries[parameter] = TensorStorageMetadata(TensorProperties(dtype=first.described.dtype), size, chunks)
            places |= {MetadataIndex(parameter, piece.offsets): piece.stored for piece in pieces}
        # torch's annotation leaves out that values may be of any kind.
        return Metadata(entries, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))  # type: ignore[arg-type]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, file by file."""
        from safetensors import safe_open

        wanted = defaultdict(list)
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            wanted[stored.file].append((stored, item))
        for file, items in wanted.items():
            with safe_open(file, framework="pt") as opened:
                for stored, item in items:
                    ranges = [
                        slice(at, at + length) for at, length in zip(item.storage_offsets, item.lengths, strict=True)
                    ]
                    # A part of a stack has no dimension for its row.
                    own = tuple(ranges[len(ranges) - len(stored.described.shape) :])
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(opened.get_slice(stored.name)[own].view(target.shape))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _pieces(self) -> Iterator[tuple[str, list[_Piece]]]:
        """Yield the pieces of each parameter, in order."""
        parts: dict[str, dict[tuple[int, int] | None, _Stored]] = defaultdict(dict)
        for name, (file, described) in read_files(self._path).items():
            if (part := self._part_of(name)) is None:
                continue
            stored = _Stored(name, file, described)
            place = None if part.row is None else (part.row, part.column)
            found = parts[part.parameter]
            if place in found or (found and None in (place, *found)):
                raise CheckpointBroken(
                    f"{self._path} is damaged: `{shown(name)}` is of `{shown(part.parameter)}`, which is there already;"
                    " write it again"
                )
            found[place] = stored
        for parameter, found in parts.items():
            if (whole := found.get(None)) is not None:
                shape = torch.Size(whole.described.shape)
                yield parameter, [_Piece(whole, torch.Size([0] * len(shape)), shape)]
            else:
                yield parameter, self._stacked(parameter, {at: one for at, one in found.items() if at is not None})

    def _stacked(self, parameter: str, parts: Mapping[tuple[int, int], _Stored]) -> list[_Piece]:
        ordered = sorted(parts.items())
        (_, first), ((row, column), _) = ordered[0], ordered[-1]
        like = first.described
        for _, stored in ordered:
            described = stored.described
            if (len(described.shape), described.shape, described.dtype) != (2, like.shape, like.dtype):
                raise CheckpointBroken(
                    f"{self._path}: `{shown(stored.name)}` is {described.dtype} of shape {list(described.shape)} beside"
                    f" {like.dtype} of shape {list(like.shape)}, which make no `{shown(parameter)}`"
                )
        # Row by row, so where the number is right none is missing.
        if len(parts) != (row + 1) * (column + 1) or any(at[1] > column for at in parts):
            raise CheckpointBroken(
                f"{self._path} is damaged: it holds {len(parts)} of the {(row + 1) * (column + 1)} parts of "
                f"`{shown(parameter)}`; write it again"
            )
        height, width = like.shape
        return [
            _Piece(stored, torch.Size([row, column * height, 0]), torch.Size([1, height, width]))
            for (row, column), stored in ordered
        ]
