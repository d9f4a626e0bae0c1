"""YAML as plain JSON values with their lines: numbers and booleans of YAML 1.2's core schema.

PyYAML alone follows YAML 1.1: `3e-4` is a string to it and `on` is true. kubectl lies between the two: `3e-4` is a
number, `on` is true and `012` is ten. Words that mean one thing to YAML 1.2 and another to kubectl (`on`, `012`,
`1_000`) are refused, so that one file is one job on a laptop and on a cluster. The mode of a volume's files alone is
read as kubectl reads it, `0755` as chmod does: everybody writes it so, and nobody means the decimal number.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from disttrain_api.structural import shorten
from disttrain_api.violation import Location
from disttrain_api.yaml_bounds import MAX_MERGED, MAX_VALUES, BoundedLoader, YamlError, compose, line_of

__all__ = ["MAX_MERGED", "MAX_VALUES", "Document", "YamlError", "read"]


@dataclass
class Document:
    """A document as plain values."""

    value: Any = None
    lines: dict[Location, int] = field(default_factory=dict)
    """Line of every key and list item, from 1."""
    problem: YamlError | None = None
    """Why it cannot be read; `value` then holds no more than kind and name."""


_NULL, _BOOL, _INT, _FLOAT, _STR, _MERGE = (
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "merge")
)
_DISPUTED = "disputed"
# No more than 63 bits.
_OCTAL = re.compile("0[0-7]{1,21}")


class _Loader(BoundedLoader):
    """Resolves plain words by the patterns below alone."""

    yaml_implicit_resolvers: dict[Any, Any] = {}


for _tag, _pattern in (
    (_NULL, r"~|null|Null|NULL|"),
    (_BOOL, r"true|True|TRUE|false|False|FALSE"),
    # kubectl: booleans; octal, binary and signed hexadecimal numbers; numbers with underscores.
    (_DISPUTED, r"y|Y|yes|Yes|YES|on|On|ON|n|N|no|No|NO|off|Off|OFF"),
    (
        _DISPUTED,
        r"[-+]?0[0-9_]+|[-+]0[oxOX][0-9a-fA-F_]+|0[OX][0-9a-fA-F_]+|[-+]?0[bB][01_]+|0[ox][0-9a-fA-F]*_[0-9a-fA-F_]*",
    ),
    (_DISPUTED, r"(?=[^_]*_)[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9_]+)?"),
    (_INT, r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    (_FLOAT, r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    (_MERGE, r"<<"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})\\Z"), None)


def read(text: str) -> list[Document]:
    """The documents of a text, without the empty ones. Raises YamlError."""
    found = read_each(text)
    for document in found:
        if document.problem is not None:
            raise document.problem
    return found


def read_each(text: str) -> list[Document]:
    """Read documents as `read` does; a document that cannot be read is returned as its error. Raises YamlError if the
    text is no YAML."""
    return [_read(node) for node in compose(text, _Loader)]


def _read(node: yaml.Node) -> Document:
    try:
        return _Reader().read(node)
    except YamlError as problem:
        metadata = _child(node, "metadata")
        outline = {"kind": _word(_child(node, "kind")), "metadata": {"name": _word(_child(metadata, "name"))}}
        return Document(outline, {(): line_of(node)}, problem)


def _child(node: yaml.Node | None, key: str) -> yaml.Node | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for name, value in pairs if name.value == key), None)


def _word(node: yaml.Node | None) -> str | None:
    return node.value if isinstance(node, yaml.ScalarNode) else None


class _Reader:
    """Nodes of one document -> values."""

    def __init__(self) -> None:
        self._document = Document()
        self._strings: dict[int, str] = {}
        """By their nodes: however many aliases stand for one, it is one string."""

    def read(self, node: yaml.Node) -> Document:
        self._document.value = self._value(node, ())
        return self._document

    def _value(self, node: yaml.Node, location: Location) -> Any:
        self._document.lines.setdefault(location, line_of(node))
        if isinstance(node, yaml.ScalarNode):
            if node.tag == _DISPUTED and _is_file_mode(location) and _OCTAL.fullmatch(node.value):
                return int(node.value, 8)
            return self._string(node) if node.tag == _STR else _scalar(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, location)
        return self._sequence(node, location)

    def _string(self, node: yaml.ScalarNode) -> str:
        if id(node) not in self._strings:
            self._strings[id(node)] = _string(node)
        return self._strings[id(node)]

    def _sequence(self, node: yaml.Node, location: Location) -> list[Any]:
        _no_tag(node, "tag:yaml.org,2002:seq")
        return [self._value(item, (*location, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        _no_tag(node, "tag:yaml.org,2002:map")
        own: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                for source in _merge_sources(value_node):
                    for key, value in self._value(source, location).items():
                        merged.setdefault(key, value)
                continue
            key = self._key(key_node)
            if key in lines:
                twice = f"in lines {lines[key]} and {line_of(key_node)}"
                raise YamlError(f"key `{shorten(key)}` is given twice, {twice}", line_of(key_node))
            lines[key] = line_of(key_node)
            self._document.lines[(*location, key)] = line_of(key_node)
            own[key] = self._value(value_node, (*location, key))
        return {**merged, **own}

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise YamlError("a key must be a word", line_of(node))
        if node.tag != _STR:
            word = shorten(node.value or "null")
            raise YamlError(f"key {word} is not a string: write it in quotes", line_of(node))
        return self._string(node)


def _merge_sources(node: yaml.Node) -> Iterator[yaml.Node]:
    """The mappings that `<<` takes over; the first one that has a key wins."""
    sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if len(sources) > MAX_MERGED:
        raise YamlError(
            f"`<<` takes over {len(sources)} objects, and may take over at most {MAX_MERGED}", line_of(node)
        )
    for source in sources:
        if not isinstance(source, yaml.MappingNode):
            raise YamlError("`<<` takes over keys of an object, or of a list of objects", line_of(node))
        yield source


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if node.tag == _NULL:
        return None
    if node.tag == _BOOL:
        return text.lower() == "true"
    if node.tag == _INT:
        return _integer(node)
    if node.tag == _FLOAT:
        return _float(node)
    if node.tag == _DISPUTED:
        sentence = f"{shorten(text, 40)} means one thing to YAML 1.2 and another to kubectl: {_instead(text)}"
        raise YamlError(sentence, line_of(node))
    if node.tag == _MERGE:
        return text
    raise _unknown_tag(node)


def _is_file_mode(location: Location) -> bool:
    """Whether a volume of a pod template has the mode of its files there."""
    return location[-1:] in (("mode",), ("defaultMode",)) and "volumes" in location


def _instead(text: str) -> str:
    word, shown = text.lower(), shorten(text, 40)
    if word in ("y", "yes", "on"):
        number = "true"
    elif word in ("n", "no", "off"):
        number = "false"
    else:
        number = _numbers(word) or "a decimal number without leading zeros and underscores"
    return f"write {number}, or '{shown}' in quotes"


def _numbers(word: str) -> str | None:
    """Return the value of the word in kubectl and, if that is a number, in YAML 1.2; None if it is ambiguous."""
    digits = word.replace("_", "")
    # What nobody writes is no matter, and a long row of digits takes Python a long time.
    if len(digits) > 32:
        return None
    try:
        if not re.fullmatch("[-+]?0[0-9]+", digits):
            return f"{float(digits):g}" if "." in digits else str(int(digits, 0))
        decimal = int(digits)
        if "8" in digits or "9" in digits:
            return str(decimal)
        octal = int(digits, 8)
    except ValueError:
        return None
    if octal == decimal or "_" in word:
        return str(octal)
    return f"{octal} as kubectl reads it, {decimal} as YAML 1.2 does"


def _string(node: yaml.ScalarNode) -> str:
    text: str = node.value
    if text.isascii():
        return text
    try:
        # JSON's escapes write a character beyond 16 bits as two halves, which PyYAML leaves apart.
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise YamlError("a string contains half a character: a lone \\ud800 to \\udfff", line_of(node)) from None


def _integer(node: yaml.ScalarNode) -> int:
    text: str = node.value
    # A long row of digits takes Python a long time.
    number = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if len(text) <= 32 else 2**64
    if not -(2**63) <= number < 2**63:
        raise YamlError(f"{text[:40]} is too large for an integer", line_of(node))
    return number


def _float(node: yaml.ScalarNode) -> float | int:
    text: str = node.value
    number = math.nan if "n" in text.lower() else float(text)
    if not math.isfinite(number):
        raise YamlError(f"{text[:40]} is not a finite number", line_of(node))
    # As kubectl sends it: 1e3 and 1.0 are integers in JSON.
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _no_tag(node: yaml.Node, expected: str) -> None:
    if node.tag != expected:
        raise _unknown_tag(node)


def _unknown_tag(node: yaml.Node) -> YamlError:
    return YamlError(f"tag {shorten(node.tag.replace('tag:yaml.org,2002:', '!!'))} is not supported", line_of(node))
