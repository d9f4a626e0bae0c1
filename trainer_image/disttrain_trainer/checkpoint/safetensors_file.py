"""Safetensors files that anybody may have written: the header is read and checked before anything else is done.

    8 bytes: length of the header | header: JSON, {name: {dtype, shape, data_offsets}} | data, without holes or overlaps

https://huggingface.co/docs/safetensors. The library checks most of this, too; its errors name neither file nor tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import StrictInt, StrictStr, TypeAdapter, ValidationError
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

from disttrain_trainer.checkpoint.json_walk import NotJson, Walk
from disttrain_trainer.checkpoint.metadata_parts import MAX_DIMENSIONS
from disttrain_trainer.runtime.errors import CheckpointBroken, shown
from disttrain_trainer.runtime.files import require_stored

SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 25_000_000
"""As much as the clients of Hugging Face's Hub read; a quarter of a million tensors have about as much."""
_SHORTEST = 10
_NOTES = "__metadata__"
_LARGEST = 2**63

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


class StoredTensor(NamedTuple):
    """A tensor's entry in the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Its first byte, counted from the begin of the data."""
    end: int
    """The byte after its last."""


class _Described(NamedTuple):
    dtype: StrictStr
    shape: tuple[StrictInt, ...]
    data_offsets: tuple[StrictInt, StrictInt]


_DESCRIBED = TypeAdapter(_Described)


class _Flaw(Exception):  # noqa: N818 - said of a file, not of what went wrong
    """An error, as the rest of a sentence that begins with the file."""


def read_tensors(file: Path) -> Mapping[str, StoredTensor]:
    """Return what the file holds, by name; its data are not read.

    Raises CheckpointBroken with one sentence that names the file, what was found and what was expected.
    """
    try:
        header, size = _read_header(file)
        tensors = _parse(header, size)
        _require_no_holes(tensors, size)
    except _Flaw as flaw:
        raise CheckpointBroken(f"{file} {flaw}; name another file, or write this one again") from None
    except OSError as error:
        raise CheckpointBroken(f"{file} cannot be read: {error.strerror or error}") from error
    return tensors


def _read_header(file: Path) -> tuple[str, int]:
    """Return the header, and how many bytes of data follow. Reads no more than MAX_HEADER_BYTES."""
    # A named pipe that has taken the file's place must not be waited for. Links are followed: the Hub's cache has them.
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size < _SHORTEST:
            raise _Flaw(f"is no safetensors file: it has {size} bytes, expected at least {_SHORTEST}")
        length, rest = int.from_bytes(opened.read(8), "little"), size - 8
        if length > rest:
            raise _Flaw(f"is cut off or no safetensors file: it begins with a header of {length} bytes, {rest} follow")
        if length > MAX_HEADER_BYTES:
            raise _Flaw(f"begins with a header of {length} bytes, expected at most {MAX_HEADER_BYTES}")
        require_stored(opened.fileno(), file)
        header = opened.read(length)
    if len(header) < length:
        raise _Flaw(f"became shorter while it was read: {len(header)} bytes of its header of {length} are there")
    try:
        return header.decode(), rest - length
    except UnicodeDecodeError as error:
        raise _Flaw(f"has a header that is no JSON: {error}") from None


def _parse(header: str, size: int) -> dict[str, StoredTensor]:
    """size: bytes of data that are there."""
    walk = Walk(header)
    if not header.startswith("{"):
        raise _Flaw("has a header that is no JSON object, expected an entry for each tensor")
    tensors: dict[str, StoredTensor] = {}
    try:
        for name in walk.items():
            if name == _NOTES:
                _require_whole(walk)
            elif name in tensors:
                raise _Flaw(f"is damaged: `{shown(name)}` is in its header twice")
            else:
                tensors[name] = _tensor(name, walk.value(), size)
        walk.end()
    except NotJson as error:
        raise _Flaw(f"has a header that is no JSON: {shown(str(error))}") from None
    return tensors


def _tensor(name: str, entry: object, size: int) -> StoredTensor:
    """size: bytes of data that are there."""
    tensor = f"`{shown(name)}`"
    try:
        described = _DESCRIBED.validate_python(tuple(entry[key] for key in _Described._fields))  # type: ignore[index]
    except (ValidationError, TypeError, KeyError):
        described = None
    numbers = () if described is None else (*described.shape, *described.data_offsets)
    if described is None or not all(0 <= number < _LARGEST for number in numbers):
        raise _Flaw(
            f"is damaged: {tensor} is described by `{shown(str(entry))}`, expected dtype, shape and data_offsets in "
            "whole numbers from 0"
        )
    shape, (begin, end) = described.shape, described.data_offsets
    dtype = DTYPES.get(described.dtype)
    if dtype is None:
        known = ", ".join(sorted(DTYPES))
        raise _Flaw(f"cannot be used: {tensor} has dtype '{shown(described.dtype)}', expected one of {known}")
    if len(shape) > MAX_DIMENSIONS:
        raise _Flaw(f"cannot be used: {tensor} has {len(shape)} dimensions, expected at most {MAX_DIMENSIONS}")
    if not begin <= end <= size:
        raise _Flaw(f"is cut off or damaged: {tensor} lies at bytes {begin} to {end}, {size} are there")
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise _Flaw(f"is damaged: {tensor} has {end - begin} bytes, its shape {shown(str(list(shape)))} needs {needed}")
    return StoredTensor(dtype, shape, begin, end)


def _require_no_holes(tensors: Mapping[str, StoredTensor], size: int) -> None:
    """Check that each byte of the data belongs to exactly one tensor, as the format requires."""
    expected = 0
    for name, stored in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if stored.begin != expected:
            raise _Flaw(f"is damaged: `{shown(name)}` begins at byte {stored.begin}, expected {expected}")
        expected = stored.end
    if expected != size:
        raise _Flaw(f"is damaged: it has {size} bytes of data, its tensors have {expected}")


def _require_whole(notes: Walk) -> None:
    """torch writes sharded checkpoints in this format, too: a tensor of such a file can be a part of one."""
    if notes.next_sign() != "{":
        raise _Flaw(f"is damaged: `{_NOTES}` is no object, expected texts by name")
    for name in notes.items():
        if notes.next_sign() != '"':
            raise _Flaw(f"is damaged: `{shown(name)}` in `{_NOTES}` is no text")
        text = notes.text()
        if name == CUSTOM_METADATA_KEY:
            _require_no_part(text)


def _require_no_part(text: str) -> None:
    walk = Walk(text)
    try:
        for name in walk.items():
            if any(list(walk.value()[SAVED_OFFSETS_KEY])):
                raise _Flaw(f"holds a part of `{shown(name)}`, expected all of it: join the files of the checkpoint")
        walk.end()
    except (NotJson, TypeError, KeyError) as error:
        raise _Flaw(
            f"has a `{CUSTOM_METADATA_KEY}` that cannot be read, expected where each tensor begins: {shown(str(error))}"
        ) from None
