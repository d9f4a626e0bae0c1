"""Allowed content of `.metadata`: the classes and calls that it may name, and its bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

T = TypeVar("T")

MAX_DIMENSIONS = 64
"""The most dimensions that a stored tensor may have; torch's own kernels take as many."""
_MADE_PER_BYTE = 64
"""Bytes of memory for each of the file. A file that torch writes takes 8 to 18."""
_ALWAYS_MADE = 4096
REFERENCE = 8
"""Bytes."""


class NotMetadata(Exception):  # noqa: N818 - said of a file, not of what went wrong
    """The file holds something else; the message says what."""


class Name(NamedTuple):
    """A class or function that the file names. Never called: `CALLS` holds what is done instead."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


CLASSES: dict[Name, Any] = {
    Name(kind.__module__, kind.__name__): kind
    for kind in (
        Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, StorageMeta,
        TensorProperties, _StorageInfo,
    )
}  # fmt: skip
"""Classes of which the file may hold objects: all are dataclasses."""
KINDS = frozenset(CLASSES.values())
MUTABLE = KINDS | {list, dict}
_ENCODING = Name(torchs.__name__, _MEM_FORMAT_ENCODING.__name__)


def _size(numbers: object) -> torch.Size:
    if isinstance(numbers, tuple) and len(numbers) > MAX_DIMENSIONS:
        raise NotMetadata(f"a size of {len(numbers)} dimensions, expected at most {MAX_DIMENSIONS}")
    if not isinstance(numbers, tuple) or not all(type(number) is int and number >= 0 for number in numbers):
        raise NotMetadata("a size that is not made of whole numbers")
    return torch.Size(numbers)


def _layout(name: object) -> torch.layout:
    if name != "torch.strided":
        raise NotMetadata("a tensor that is not strided")
    return torch.strided


def _member(of: object, name: object) -> _MEM_FORMAT_ENCODING:
    """Python 3.11 writes a member of an enumeration as getattr(class, name)."""
    if (
        not isinstance(of, Name)
        or of != _ENCODING
        or not isinstance(name, str)
        or name not in _MEM_FORMAT_ENCODING.__members__
    ):
        raise NotMetadata("getattr of something else than a memory format")
    return _MEM_FORMAT_ENCODING[name]


def _encoding(number: object) -> _MEM_FORMAT_ENCODING:
    """Later versions of Python write it as class(number)."""
    if type(number) is not int:
        raise NotMetadata("a memory format that is no number")
    return _MEM_FORMAT_ENCODING(number)


def _path(*parts: object) -> str:
    """Return '' for the former path of the checkpoint, which is unused."""
    return ""


CALLS: dict[Name, Callable[..., object]] = {
    Name("torch", "Size"): _size,
    Name("torch.serialization", "_get_layout"): _layout,
    Name("builtins", "getattr"): _member,
    _ENCODING: _encoding,
    Name("pathlib", "PosixPath"): _path,
    Name("pathlib._local", "PosixPath"): _path,
}


def typed(value: Any, kind: type[T], what: str) -> T:
    """Return the value. Raises NotMetadata, which calls it `what`, for one of another type."""
    if not isinstance(value, kind):
        raise NotMetadata(f"{what} of type {type(value).__name__}, expected {kind.__name__}")
    return value


def check_index(fields: dict[str, Any]) -> None:
    """Before it is hashed, compared or printed: of what is nested, that could take for ever."""
    typed(fields.get("fqn"), str, "a name in `storage_data`")
    if fields.get("offset") is not None:
        typed(fields["offset"], torch.Size, "an offset in `storage_data`")
    if fields.get("index") is not None:
        typed(fields["index"], int, "an index in `storage_data`")


class Room:
    """Expanded size of a file, against the bound that its length allows."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._most = self._left = _MADE_PER_BYTE * length + _ALWAYS_MADE

    def take(self, size: int) -> None:
        """Raise NotMetadata where there is no room for so many bytes more."""
        self._left -= size
        if self._left < 0:
            raise NotMetadata(
                f"things that come to more than {self._most} bytes where each is written out as often as it is named, "
                f"in a file of {self._length}"
            )

    def take_again(self, found: object) -> None:
        """Take what a thing that is there already would need, if it and all within it were written out once more."""
        left = [found]
        while left:
            one = left.pop()
            self.take(REFERENCE)
            kind = type(one)
            if kind is str:
                self.take(len(one))  # type: ignore[arg-type]
            elif kind in (tuple, list, torch.Size):
                self.take(REFERENCE * len(one))  # type: ignore[arg-type]
                left.extend(one if kind is not torch.Size else ())  # type: ignore[arg-type]
            elif kind is dict:
                self.take(2 * REFERENCE * len(one))  # type: ignore[arg-type]
                left.extend(one)  # type: ignore[arg-type]
                left.extend(one.values())  # type: ignore[attr-defined]
            elif kind in KINDS:
                left.extend(vars(one).values())
