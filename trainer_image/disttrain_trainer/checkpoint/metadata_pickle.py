"""The pickle of `.metadata`, torch's list of what stands where, read without running anything.

Pickles can name any function to be called. This reader understands the few instructions that a
`torch.distributed.checkpoint.metadata.Metadata` is made of and the few classes in it; it calls nothing that the
file names, and refuses all else. Not pickle.Unpickler with a list of classes: that one can be made to change the
classes themselves, to fill the memory from a file of ten bytes, and to overflow the stack.

A pickle may name a thing again that it has made before, in two bytes. Each time that counts as much as the thing would
if it were written out there: so what is read, expanded, is never larger than so many times the file (`Room`), and all
that looks at it takes as long at most.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex, TensorProperties

from disttrain_trainer.checkpoint.metadata_parts import (
    CALLS,
    CLASSES,
    KINDS,
    MUTABLE,
    REFERENCE,
    Name,
    NotMetadata,
    Room,
    check_index,
)

_LONGEST_INTEGER = 8
"""Bytes."""
_MOST_ALIKE = 1000
"""Keys whose hash values are those of others: a dictionary compares each with all of them."""
_PROPERTIES, _MEMORY_FORMAT = 5, 3
"""How many values TensorProperties are written as, and which of them is the memory format."""


class Reader:
    """Obeys the instructions of one file, one after the other (see pickletools of the standard library)."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._room = Room(len(data))
        self._named_again: set[int] = set()
        """Identities of lists, dictionaries and objects; the memo keeps them alive. What they hold has been counted."""
        self._hashes: set[int] = set()
        self._alike = 0

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

    def _push(self, made: object) -> None:
        self._room.take(REFERENCE + sys.getsizeof(made))
        self._stack.append(made)

    def _remember(self) -> None:
        self._room.take(REFERENCE)
        self._memo.append(self._stack[-1])

    def _recall(self, form: struct.Struct) -> None:
        found = self._memo[self._number(form)]
        self._room.take_again(found)
        if type(found) in MUTABLE:
            self._named_again.add(id(found))
        self._stack.append(found)

    def _to_change(self) -> Any:
        """Return the container that an instruction adds to."""
        found = self._stack[-1]
        if id(found) in self._named_again:
            raise NotMetadata("a list, dictionary or object that changes after it was named again")
        return found

    def _push_integer(self, form: struct.Struct) -> None:
        self._push(self._number(form))

    def _push_long(self) -> None:
        length = self._number(_U1)
        if length > _LONGEST_INTEGER:
            raise NotMetadata(f"a number of {length} bytes")
        self._push(int.from_bytes(self._bytes(length), "little", signed=True))

    def _push_text(self, form: struct.Struct) -> None:
        self._push(self._bytes(self._number(form)).decode())

    def _push_tuple(self, count: int) -> None:
        if count > len(self._stack):
            raise NotMetadata("a tuple of nothing")
        at = len(self._stack) - count
        parts, self._stack[at:] = tuple(self._stack[at:]), []
        self._push(parts)

    def _push_marked_tuple(self) -> None:
        self._push(tuple(self._above_mark()))

    def _push_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise NotMetadata("a class without a name")
        found = Name(module, name)
        # Not getattr, which imports what torch loads late.
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            self._push(dtype)
        elif found in CLASSES or found in CALLS:
            self._push(found)
        else:
            shown = f"{module[:200]}.{name[:200]}"
            raise NotMetadata(f"`{shown:.200}`, which is no part of a checkpoint's metadata")

    def _call(self) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, Name) or name not in CALLS or not isinstance(arguments, tuple):
            raise NotMetadata("a call of something else than a size")
        self._push(CALLS[name](*arguments))

    def _make(self) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, Name) or name not in CLASSES or arguments != ():
            raise NotMetadata("an object of something else than a class of torch.distributed.checkpoint.metadata")
        kind = CLASSES[name]
        self._push(kind.__new__(kind))

    def _fill(self) -> None:
        state, made = self._stack.pop(), self._to_change()
        kind = type(made)
        if kind is TensorProperties and isinstance(state, tuple):
            # torch prints what is none.
            if len(state) != _PROPERTIES or not isinstance(state[_MEMORY_FORMAT], _MEM_FORMAT_ENCODING):
                raise NotMetadata("the format of a tensor without a memory format")
            made.__setstate__(state)
            return
        if kind not in KINDS or not isinstance(state, dict):
            raise NotMetadata("fields of something else than a class of torch.distributed.checkpoint.metadata")
        for name in state:
            if type(name) is not str:
                raise NotMetadata(f"a field of {kind.__name__} without a name")
            if name not in kind.__dataclass_fields__:
                raise NotMetadata(f"the field `{name:.80}` of {kind.__name__}, unknown to torch {torch.__version__}")
        if kind is MetadataIndex:
            check_index(state)
        self._room.take(sys.getsizeof(state))
        made.__dict__.update(state)

    def _append(self) -> None:
        item = self._stack.pop()
        self._list().append(item)

    def _append_marked(self) -> None:
        items = self._above_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        found = self._to_change()
        if not isinstance(found, list):
            raise NotMetadata("an item without a list")
        return found

    def _set(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_all([key, value])

    def _set_marked(self) -> None:
        self._set_all(self._above_mark())

    def _set_all(self, items: list[Any]) -> None:
        found = self._to_change()
        if not isinstance(found, dict):
            raise NotMetadata("a key without a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # To hash anything deeper could take for ever.
            if type(key) is not str and type(key) is not MetadataIndex:
                raise NotMetadata("a key that is no name")
            if type(key) is MetadataIndex:
                self._count_alike(hash(key))
            found[key] = value

    def _count_alike(self, value: int) -> None:
        """Bound equal hash values: those of texts cannot be predicted outside this process; those of sizes can."""
        if value in self._hashes:
            self._alike += 1
            if self._alike > _MOST_ALIKE:
                raise NotMetadata(
                    f"keys that cannot be told apart by their hash values: more than {_MOST_ALIKE}, expected none"
                )
        self._hashes.add(value)


_U1, _U2, _I4, _U4 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<I")
_STOP = ord(".")
_INSTRUCTIONS: dict[int, Callable[[Reader], None]] = {
    0x80: lambda reader: reader._skip(1),  # the protocol
    0x95: lambda reader: reader._skip(8),  # the length of a frame
    0x94: Reader._remember,
    ord("h"): lambda reader: reader._recall(_U1),
    ord("j"): lambda reader: reader._recall(_U4),
    ord("N"): lambda reader: reader._push(None),
    0x88: lambda reader: reader._push(True),
    0x89: lambda reader: reader._push(False),
    ord("K"): lambda reader: reader._push_integer(_U1),
    ord("M"): lambda reader: reader._push_integer(_U2),
    ord("J"): lambda reader: reader._push_integer(_I4),
    0x8A: Reader._push_long,
    0x8C: lambda reader: reader._push_text(_U1),
    ord("X"): lambda reader: reader._push_text(_U4),
    ord("("): lambda reader: reader._marks.append(len(reader._stack)),
    ord(")"): lambda reader: reader._push_tuple(0),
    0x85: lambda reader: reader._push_tuple(1),
    0x86: lambda reader: reader._push_tuple(2),
    0x87: lambda reader: reader._push_tuple(3),
    ord("t"): Reader._push_marked_tuple,
    ord("]"): lambda reader: reader._push([]),
    ord("a"): Reader._append,
    ord("e"): Reader._append_marked,
    ord("}"): lambda reader: reader._push({}),
    ord("s"): Reader._set,
    ord("u"): Reader._set_marked,
    0x93: Reader._push_name,
    ord("R"): Reader._call,
    0x81: Reader._make,
    ord("b"): Reader._fill,
}
