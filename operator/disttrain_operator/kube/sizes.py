"""How much memory a value takes, and how much a JSON text may take once it is parsed.

Text says little of it: a list of `{}` takes twenty-nine times its own bytes as objects.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

LARGE_BYTES = 64 * 1024
"""A text that is longer is read in a thread: this much is about a millisecond of work."""
MAX_PARSED_BYTES = 64 * 2**20
"""An object or page takes no more memory. Parsed, a text of nothing but brackets is about thirty times as large."""

# What CPython takes for objects of these kinds, rounded up, and for the places that point to them.
_EMPTY_OBJECT, _OBJECT, _LIST, _ENTRY, _ITEM, _PLACE, _LEAST = 80, 232, 88, 120, 64, 16, 256
_BYTES_OF_A_CHARACTER = 4
_OF_INSTANCE = 56
_WITHOUT_PARTS = frozenset((str, bytes, int, float))

# Keys that our own code writes are there once for all objects.
_SHARED_KEYS = frozenset(
    map(
        id,
        (
            *("metadata", "spec", "status", "name", "namespace", "uid", "resourceVersion", "generation", "labels"),
            *("creationTimestamp", "deletionTimestamp", "ownerReferences", "apiVersion", "kind", "controller"),
            *("refused", "parsed", "phase", "state", "gang", "begun", "rests", "packed", "reserved", "node", "pod"),
        ),
    )
)


class TooMuch(ValueError):  # noqa: N818 - what the object is
    """An object would take more memory than one may. The text is a sentence for its owner, without an end."""

    def __init__(self, why: str, what_to_do: str) -> None:
        super().__init__(why)
        self.what_to_do = what_to_do


def size_of(value: Any) -> int:
    """Return the bytes of a value and of all that it holds; what it holds twice counts once. Does not recurse."""
    seen = set(_SHARED_KEYS)
    size, rest = 0, [value]
    while rest:
        item = rest.pop()
        if item is None or item is True or item is False or id(item) in seen:
            continue
        seen.add(id(item))
        size += sys.getsizeof(item)
        # By its type: this runs for each event of a watch, and `isinstance` would take most of it.
        kind = type(item)
        if kind is dict:
            rest.extend(item)
            rest.extend(item.values())
        elif kind is list:
            rest.extend(item)
        elif kind not in _WITHOUT_PARTS:
            rest.extend(_parts(item))
            if is_dataclass(item):
                size += _OF_INSTANCE
    return size


def _parts(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        yield from item.keys()
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset):
        yield from item
    elif is_dataclass(item):
        yield from (getattr(item, field.name) for field in fields(item))


def parsed_size(text: bytes) -> int:
    """Return what a JSON text takes at most once it is parsed. It costs little: nothing is parsed for it."""
    empty = text.count(b"{}")
    characters = len(text) * (1 if text.isascii() else _BYTES_OF_A_CHARACTER)
    # Objects and lists are counted where they begin.
    after_these = text.count(b"},") + text.count(b"],")
    return (
        _LEAST
        + characters
        + empty * _EMPTY_OBJECT
        + (text.count(b"{") - empty) * _OBJECT
        + text.count(b"[") * _LIST
        + text.count(b":") * _ENTRY
        + (text.count(b",") - after_these) * _ITEM
        + after_these * _PLACE
    )
