"""Reads what a JSON parser refuses: text of any depth, and text whose end is cut off.

orjson stops at a depth of 1,024, an API server takes objects about ten times as deep. Nothing here recurses, and each
byte is looked at once. It is slow beside a parser, and used for what a parser has refused only.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from disttrain_api.bounds import cut
from disttrain_operator.kube.sizes import TooMuch

# A name and its colon, another string, or a bracket. The last alternative is a string without an end.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"(?:\s*+:)?+|[{}\[\]]|"', re.DOTALL)
_QUOTE, _COLON, _OPENING = ord('"'), ord(":"), (ord("{"), ord("["))
MAX_WHY = 200

Path = tuple[bytes, ...]
_METADATA = (b"metadata",)
_METADATA_OF_EVENT = (b"object", b"metadata")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that was not taken in, and why."""

    namespace: str
    """Empty for objects of the cluster."""
    name: str
    uid: str
    version: int
    why: str
    what_to_do: str = ""
    """Where that is not what it always is."""
    needs: int = 0
    """The bytes for which there was no room; 0: it cannot be taken in however much there is."""
    group: str | None = None
    """Whose it is, where that is known."""


class Malformed(ValueError):  # noqa: N818 - what the text is
    """The text ends too early, is no JSON, or holds more than was to be looked at."""


def walk(text: bytes, deepest: int, tokens: int | None = None) -> Iterator[tuple[Path, int, int]]:
    """Yield path, begin and end of the strings, objects and arrays at most `deepest` levels below the top.

    An object or array comes when it ends, after what it holds; in a path an element of an array has an empty name.
    Raises Malformed after `tokens` tokens, and at the end of a text that ends too early.
    """
    path, begins, depth = [b""] * (deepest + 1), [0] * (deepest + 2), 0
    for count, token in enumerate(_TOKEN.finditer(text)):
        begin, end = token.span()
        first = text[begin]
        if first == _QUOTE:
            if end - begin == 1 or not depth:
                break
            if depth > deepest:
                pass
            elif text[end - 1] == _COLON:
                path[depth] = text[begin + 1 : text.rindex(b'"', begin, end)]
            else:
                yield tuple(path[1 : depth + 1]), begin, end
        elif first in _OPENING:
            depth += 1
            if depth <= deepest + 1:
                begins[depth] = begin
            if depth <= deepest:
                path[depth] = b""
        else:
            depth -= 1
            if depth <= 0:
                if depth == 0:
                    return
                break
            if depth <= deepest:
                yield tuple(path[1 : depth + 1]), begins[depth + 1], end
        if tokens is not None and count >= tokens:
            break
    raise Malformed("it ends too early, or is no JSON")


def read_event(line: bytes, why: str, tokens: int) -> tuple[str, Unreadable | None]:
    """Return the type of a watch event, and the object that it is about; an empty type where nothing can be seen."""
    kind, found = "", dict[bytes, str]()
    try:
        for path, begin, end in walk(line, 3, tokens):
            if path == (b"type",):
                kind = _string(line[begin:end])
            elif path[:-1] == _METADATA_OF_EVENT:
                _collect(found, path[-1], line[begin:end])
            if kind and _is_complete(found, path == _METADATA_OF_EVENT):
                break
    except Malformed:
        pass
    return kind, _identified(found, why)


def read_identity(text: bytes, why: str) -> Unreadable | None:
    """Return the object that the text is about; None where the text does not say."""
    found = dict[bytes, str]()
    try:
        for path, begin, end in walk(text, 2):
            if path[:-1] == _METADATA:
                _collect(found, path[-1], text[begin:end])
            if _is_complete(found, path == _METADATA):
                break
    except Malformed:
        pass
    return _identified(found, why)


def identity_of(raw: Any, why: str) -> Unreadable | None:
    """Return the parsed object as one that was not taken in; None where it does not say which it is."""
    metadata = raw.get("metadata") if isinstance(raw, Mapping) else None
    if not isinstance(metadata, Mapping):
        return None
    texts = {key: metadata[key.decode()] for key in _KEYS if isinstance(metadata.get(key.decode()), str)}
    return _identified(texts, why)


def refused(raw: Any, error: Exception) -> Unreadable | None:
    """Return the parsed object as one that this error kept from being taken in; None as `identity_of`."""
    found = identity_of(raw, why_not(error))
    return replace(found, what_to_do=error.what_to_do) if found and isinstance(error, TooMuch) else found


def why_not(error: Exception) -> str:
    """Return the message about an object that this error kept out of the cache."""
    if isinstance(error, TooMuch):
        return cut(str(error), MAX_WHY)
    if isinstance(error, RecursionError) or (isinstance(error, orjson.JSONDecodeError) and "depth" in error.msg):
        return "it nests too deep to be read"
    if isinstance(error, orjson.JSONDecodeError):
        return cut(f"it cannot be decoded ({error.msg})", MAX_WHY)
    return cut(f"it does not have the expected shape ({type(error).__name__}: {error})", MAX_WHY)


_KEYS = (b"uid", b"resourceVersion", b"name", b"namespace")


def _collect(found: dict[bytes, str], key: bytes, text: bytes) -> None:
    if key in _KEYS:
        found[key] = _string(text)


def _is_complete(found: Mapping[bytes, str], ended: bool) -> bool:
    """Objects of the cluster have no namespace: of them it is known when their metadata has ended."""
    return len(found) == len(_KEYS) or ended


def _string(text: bytes) -> str:
    if text[:1] != b'"':
        return ""
    try:
        return str(orjson.loads(text))
    except orjson.JSONDecodeError:
        return ""


def _identified(found: Mapping[bytes, str], why: str) -> Unreadable | None:
    uid, version = found.get(b"uid", ""), found.get(b"resourceVersion", "")
    if not uid or not (version.isascii() and version.isdecimal()):
        return None
    return Unreadable(found.get(b"namespace", ""), found.get(b"name", ""), uid, int(version), why)
