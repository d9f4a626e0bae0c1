"""Safetensors files and folders of them, written tensor by tensor: never more than one is in memory.

https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import torch
from torch import Tensor

from disttrain_trainer.checkpoint.safetensors_file import DTYPES
from disttrain_trainer.checkpoint.safetensors_index import INDEX_FILE, MODEL_FILE
from disttrain_trainer.runtime.errors import InvalidConfiguration, shown
from disttrain_trainer.runtime.files import sync_folder

SHARD_BYTES = 5_000_000_000
"""As much as Hugging Face's libraries put into one file."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Described(NamedTuple):
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


Read = Callable[[str], Tensor]
"""The tensor of a name, on the CPU."""


def shards_of(tensors: Iterable[Described], most: int) -> list[list[Described]]:
    """Return the tensors in the order given, cut into parts of at most `most` bytes, or of one tensor."""
    shards: list[list[Described]] = []
    size = 0
    for tensor in tensors:
        if not shards or size + tensor.size > most:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size
    return shards


def write_file(target: Path, tensors: Sequence[Described], read: Read) -> None:
    """Write one file under a temporary name, then rename it. Raises OSError, or InvalidConfiguration for a number
    format that these files do not know."""
    temporary = _beside(target)
    try:
        _write(temporary, tensors, read)
        temporary.replace(target)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_folder(
    target: Path, tensors: Sequence[Described], read: Read, beside: Mapping[str, bytes | Path], most: int = SHARD_BYTES,
    model_file: str = MODEL_FILE,
) -> None:  # fmt: skip
    """Write a folder under a temporary name, then rename it: what has the target's name is whole.

    beside: other files by name, their content or where they are copied from; most: bytes of a model file.
    Raises OSError, also where the target is there and not empty, or InvalidConfiguration as `write_file`.
    """
    temporary = _beside(target)
    temporary.mkdir()
    try:
        for name, content in beside.items():
            _write_lasting(temporary / name, content if isinstance(content, bytes) else content.read_bytes())
        shards = shards_of(tensors, most)
        if len(shards) <= 1:
            _write(temporary / model_file, tensors, read)
        else:
            _write_shards(temporary, shards, read)
        sync_folder(temporary)
        temporary.rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _beside(target: Path) -> Path:
    """Return a name beside the target that nobody else uses: processes of two pods may have the same number."""
    return target.with_name(f".{target.name}.{token_hex(8)}.tmp")


def _write_lasting(file: Path, content: bytes) -> None:
    """Write a new file that survives a power cut."""
    with file.open("xb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _write_shards(folder: Path, shards: Sequence[Sequence[Described]], read: Read) -> None:
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(folder / file, shard, read)
        file_of |= {tensor.name: file for tensor in shard}
    total = sum(tensor.size for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
    _write_lasting(folder / INDEX_FILE, f"{json.dumps(index, indent=2)}\n".encode())


def _write(file: Path, tensors: Sequence[Described], read: Read) -> None:
    # As the library orders them: so each begins at a multiple of its numbers' size.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    # "format" tells other readers that these are torch's.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in ordered:
        end = begin + tensor.size
        header[tensor.name] = {"dtype": _name_of(tensor), "shape": tensor.shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("xb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            value = read(tensor.name).contiguous()
            assert (value.dtype, tuple(value.shape)) == (tensor.dtype, tensor.shape), tensor.name
            opened.write(value.reshape(-1).view(torch.uint8).numpy().data)
        opened.flush()
        os.fsync(opened.fileno())


def _name_of(tensor: Described) -> str:
    """The name of its number format. Raises InvalidConfiguration where these files have none."""
    if tensor.dtype not in _NAMES:
        raise InvalidConfiguration(
            f"`{shown(tensor.name)}` is {str(tensor.dtype).removeprefix('torch.')}, which safetensors files do not know"
            f" (they know {', '.join(str(dtype).removeprefix('torch.') for dtype in _NAMES)}): read the checkpoint "
            "itself, or train in one of these"
        )
    return _NAMES[tensor.dtype]
