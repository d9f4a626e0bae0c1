"""`.metadata` of a checkpoint, torch's list of what stands where, read without running anything.

The file is a pickle, and pickles can name any function to be called. This reader understands the few instructions
that a `torch.distributed.checkpoint.metadata.Metadata` is made of and the few classes in it; it calls nothing that the
file names, and refuses all else. Not pickle.Unpickler with a list of classes: that one can be made to change the
classes themselves, to fill the memory from a file of ten bytes, and to overflow the stack.
"""

from __future__ import annotations

import struct
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

from disttrain_trainer.runtime.files import is_plain_name

T = TypeVar("T")

_LONGEST_INTEGER = 8
"""Bytes."""
MAX_DIMENSIONS = 64
"""The most dimensions that a stored tensor may have; torch's own kernels take as many."""


class NotMetadata(Exception):  # noqa: N818 - said of a file, not of what went wrong
    """The file holds something else; the message says what."""


class _Name(NamedTuple):
    """A class or function that the file names. Never called: `_CALLS` holds what is done instead."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_CLASSES: dict[_Name, Any] = {
    _Name(kind.__module__, kind.__name__): kind
    for kind in (
        Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, StorageMeta,
        TensorProperties, _StorageInfo,
    )
}  # fmt: skip
"""Classes of which the file may hold objects: all are dataclasses."""
_ENCODING = _Name(torchs.__name__, _MEM_FORMAT_ENCODING.__name__)


def _size(numbers: object) -> torch.Size:
    if not isinstance(numbers, tuple) or not all(type(number) is int and number >= 0 for number in numbers):
        raise NotMetadata("a size that is not made of whole numbers")
    if len(numbers) > MAX_DIMENSIONS:
        raise NotMetadata(f"a size of {len(numbers)} dimensions")
    return torch.Size(numbers)


def _layout(name: object) -> torch.layout:
    if name != "torch.strided":
        raise NotMetadata("a tensor that is not strided")
    return torch.strided


def _member(of: object, name: object) -> _MEM_FORMAT_ENCODING:
    """Python 3.11 writes a member of an enumeration as getattr(class, name)."""
    if (
        not isinstance(of, _Name)
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
    """Where the checkpoint lay when it was written, which nobody uses."""
    return "/".join(map(str, (part for part in parts if isinstance(part, str))))


_CALLS: dict[_Name, Callable[..., object]] = {
    _Name("torch", "Size"): _size,
    _Name("torch.serialization", "_get_layout"): _layout,
    _Name("builtins", "getattr"): _member,
    _ENCODING: _encoding,
    _Name("pathlib", "PosixPath"): _path,
    _Name("pathlib._local", "PosixPath"): _path,
}


class _Reader:
    """Obeys the instructions of one file, one after the other (see pickletools of the standard library)."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def read(self) -> object:
        """Return the object that the file describes. Raises NotMetadata, IndexError or struct.error."""
        data = self._data
        while (code := data[self._at]) != _STOP:
            self._at += 1
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise NotMetadata(f"the pickle instruction 0x{code:02x} at byte {self._at - 1}")
            instruction(self)
        return self._stack.pop()

    def _number(self, form: struct.Struct) -> int:
        (number,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return int(number)

    def _bytes(self, length: int) -> bytes:
        found = self._data[self._at : self._at + length]
        if len(found) != length:
            raise NotMetadata("an end in the midst of a value")
        self._at += length
        return found

    def _above_mark(self) -> list[Any]:
        at = self._marks.pop()
        found, self._stack[at:] = self._stack[at:], []
        return found

    def _skip(self, count: int) -> None:
        self._at += count

    def _remember(self) -> None:
        self._memo.append(self._stack[-1])

    def _recall(self, form: struct.Struct) -> None:
        self._stack.append(self._memo[self._number(form)])

    def _push_integer(self, form: struct.Struct) -> None:
        self._stack.append(self._number(form))

    def _push_long(self) -> None:
        length = self._number(_U1)
        if length > _LONGEST_INTEGER:
            raise NotMetadata(f"a number of {length} bytes")
        self._stack.append(int.from_bytes(self._bytes(length), "little", signed=True))

    def _push_text(self, form: struct.Struct) -> None:
        self._stack.append(self._bytes(self._number(form)).decode())

    def _push_tuple(self, count: int) -> None:
        if count > len(self._stack):
            raise NotMetadata("a tuple of nothing")
        at = len(self._stack) - count
        self._stack[at:] = [tuple(self._stack[at:])]

    def _push_marked_tuple(self) -> None:
        self._stack.append(tuple(self._above_mark()))

    def _push_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise NotMetadata("a class without a name")
        found = _Name(module, name)
        # Not getattr, which imports what torch loads late.
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            self._stack.append(dtype)
        elif found in _CLASSES or found in _CALLS:
            self._stack.append(found)
        else:
            raise NotMetadata(f"`{found!s:.200}`, which is no part of a checkpoint's metadata")

    def _call(self) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, _Name) or name not in _CALLS or not isinstance(arguments, tuple):
            raise NotMetadata("a call of something else than a size")
        self._stack.append(_CALLS[name](*arguments))

    def _make(self) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, _Name) or name not in _CLASSES or arguments != ():
            raise NotMetadata("an object of something else than a class of torch.distributed.checkpoint.metadata")
        kind = _CLASSES[name]
        self._stack.append(kind.__new__(kind))

    def _fill(self) -> None:
        state, made = self._stack.pop(), self._stack[-1]
        kind = type(made)
        if kind is TensorProperties and isinstance(state, tuple):
            made.__setstate__(state)
            return
        if kind not in _CLASSES.values() or not isinstance(state, dict):
            raise NotMetadata("fields of something else than a class of torch.distributed.checkpoint.metadata")
        if not state.keys() <= kind.__dataclass_fields__.keys():
            unknown = next(str(name) for name in state if name not in kind.__dataclass_fields__)
            raise NotMetadata(f"the field `{unknown:.80}` of {kind.__name__}, unknown to torch {torch.__version__}")
        if kind is MetadataIndex:
            _check_index(state)
        made.__dict__.update(state)

    def _append(self) -> None:
        item = self._stack.pop()
        self._list().append(item)

    def _append_marked(self) -> None:
        items = self._above_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        found = self._stack[-1]
        if not isinstance(found, list):
            raise NotMetadata("an item without a list")
        return found

    def _set(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_all([key, value])

    def _set_marked(self) -> None:
        self._set_all(self._above_mark())

    def _set_all(self, items: list[Any]) -> None:
        found = self._stack[-1]
        if not isinstance(found, dict):
            raise NotMetadata("a key without a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # To hash anything deeper could take for ever.
            if type(key) is not str and type(key) is not MetadataIndex:
                raise NotMetadata("a key that is no name")
            found[key] = value


_U1, _U2, _I4, _U4 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<I")
_STOP = ord(".")
_INSTRUCTIONS: dict[int, Callable[[_Reader], None]] = {
    0x80: lambda reader: reader._skip(1),  # the protocol
    0x95: lambda reader: reader._skip(8),  # the length of a frame
    0x94: _Reader._remember,
    ord("h"): lambda reader: reader._recall(_U1),
    ord("j"): lambda reader: reader._recall(_U4),
    ord("N"): lambda reader: reader._stack.append(None),
    0x88: lambda reader: reader._stack.append(True),
    0x89: lambda reader: reader._stack.append(False),
    ord("K"): lambda reader: reader._push_integer(_U1),
    ord("M"): lambda reader: reader._push_integer(_U2),
    ord("J"): lambda reader: reader._push_integer(_I4),
    0x8A: _Reader._push_long,
    0x8C: lambda reader: reader._push_text(_U1),
    ord("X"): lambda reader: reader._push_text(_U4),
    ord("("): lambda reader: reader._marks.append(len(reader._stack)),
    ord(")"): lambda reader: reader._push_tuple(0),
    0x85: lambda reader: reader._push_tuple(1),
    0x86: lambda reader: reader._push_tuple(2),
    0x87: lambda reader: reader._push_tuple(3),
    ord("t"): _Reader._push_marked_tuple,
    ord("]"): lambda reader: reader._stack.append([]),
    ord("a"): _Reader._append,
    ord("e"): _Reader._append_marked,
    ord("}"): lambda reader: reader._stack.append({}),
    ord("s"): _Reader._set,
    ord("u"): _Reader._set_marked,
    0x93: _Reader._push_name,
    ord("R"): _Reader._call,
    0x81: _Reader._make,
    ord("b"): _Reader._fill,
}


def metadata_of(data: bytes) -> Metadata:
    """Return the Metadata in the bytes of a `.metadata` file. Raises NotMetadata, which says what was found instead."""
    try:
        found = _Reader(data).read()
        if not isinstance(found, Metadata):
            raise NotMetadata(f"an object of type {type(found).__name__}")
        return _checked(found, len(data))
    except NotMetadata:
        raise
    # Whatever goes wrong in an instruction: a missing operand, an index beyond the end, text that is no UTF-8.
    except Exception as error:
        raise NotMetadata(f"something else: {type(error).__name__}") from error


def _checked(metadata: Metadata, length: int) -> Metadata:
    """Return the same without what nobody uses. Raises NotMetadata for a field of another type or none.

    length: bytes of the file. Each part of a tensor takes some, so there are never more parts than bytes. A list that
    the file names again and again would make more, and take longer than anybody waits.
    """
    # An object that the file has not filled has no fields at all.
    fields = vars(metadata)
    entries = _typed(fields.get("state_dict_metadata"), dict, "`state_dict_metadata`")
    parts = 0
    for name, entry in entries.items():
        if type(entry) is TensorStorageMetadata:
            parts += len(_typed(vars(entry).get("chunks"), list, f"the parts of `{name!s:.200}`"))
            if parts > length:
                raise NotMetadata("one list of parts for many tensors")
            _check_tensor(_typed(name, str, "a name"), entry)
        else:
            _typed(entry, BytesStorageMetadata, f"`{name:.200}`")
    stored = _typed(fields.get("storage_data"), dict, "`storage_data`")
    for index, info in stored.items():
        _typed(index, MetadataIndex, "a key of `storage_data`")
        _check_place(_typed(info, _StorageInfo, "a value of `storage_data`"))
    version = fields.get("version")
    return Metadata(entries, {}, stored, StorageMeta(), version if isinstance(version, str) else None)


def _check_tensor(name: str, entry: TensorStorageMetadata) -> None:
    fields, what = vars(entry), f"of `{name:.200}`"
    properties = _typed(fields.get("properties"), TensorProperties, f"the format {what}")
    _typed(vars(properties).get("dtype"), torch.dtype, f"the number format {what}")
    size = _typed(fields.get("size"), torch.Size, f"the shape {what}")
    for chunk in fields["chunks"]:
        bounds = vars(_typed(chunk, ChunkStorageMetadata, f"a part {what}"))
        for bound in ("offsets", "sizes"):
            if len(_typed(bounds.get(bound), torch.Size, f"`{bound}` {what}")) != len(size):
                raise NotMetadata(f"a part {what} with another number of dimensions")


def _check_index(fields: dict[str, Any]) -> None:
    """Before it is hashed: of what is nested, that could take for ever."""
    _typed(fields.get("fqn"), str, "a name in `storage_data`")
    if fields.get("offset") is not None:
        _typed(fields["offset"], torch.Size, "an offset in `storage_data`")


def _check_place(info: _StorageInfo) -> None:
    fields = vars(info)
    name = _typed(fields.get("relative_path"), str, "the name of a file")
    if not is_plain_name(name):
        raise NotMetadata(f"the file name `{name!r:.200}`, which is no name in the checkpoint's own folder")
    for bound in ("offset", "length"):
        if _typed(fields.get(bound), int, f"`{bound}` in {name}") < 0:
            raise NotMetadata(f"a negative `{bound}` in {name}")
    if fields.get("transform_descriptors"):
        raise NotMetadata(f"a part of {name} that is compressed or encrypted")


def _typed(value: Any, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise NotMetadata(f"{what} of type {type(value).__name__}, expected {kind.__name__}")
    return value
