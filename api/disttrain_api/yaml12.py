"""YAML as plain JSON values with their lines: numbers and booleans of YAML 1.2's core schema.

PyYAML alone follows YAML 1.1: `3e-4` is a string to it and `on` is true. kubectl lies between the two: `3e-4` is a
number, `on` is true and `012` is ten. Words that mean one thing to YAML 1.2 and another to kubectl (`on`, `012`,
`1_000`) are refused, so that one file is one job on a laptop and on a cluster.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from disttrain_api.violation import Location

MAX_VALUES = 100_000
"""Values in a document. Aliases count as often as they stand: a few lines of them can mean billions."""

MAX_MERGED = 100
"""Objects in a list of `<<`."""


class YamlError(Exception):
    """A sentence, and the line it is about."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


@dataclass
class Document:
    """A document as plain values."""

    value: Any = None
    lines: dict[Location, int] = field(default_factory=dict)
    """Line of every key and list item, from 1."""


_NULL, _BOOL, _INT, _FLOAT, _STR, _MERGE = (
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "merge")
)
_DISPUTED = "disputed"


class _Loader(yaml.SafeLoader):
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
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=_Loader) if node is not None]
        return [_Reader().read(node) for node in nodes if not _is_empty(node)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(_syntax(error), mark.line + 1 if mark else None) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"character {chr(error.character)!r} may not stand in YAML", line) from None
    except RecursionError:
        raise YamlError("nested too deeply", None) from None


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == _NULL


def _syntax(error: yaml.MarkedYAMLError) -> str:
    message = error.problem or "not YAML"
    if "'\\t'" in message:
        return "a tab stands where YAML wants spaces"
    return f"not YAML: {error.context + ', ' if error.context else ''}{message}"


class _Reader:
    """Nodes of one document -> values."""

    def __init__(self) -> None:
        self._document = Document()
        self._count = 0
        self._open: set[int] = set()

    def read(self, node: yaml.Node) -> Document:
        self._document.value = self._value(node, ())
        return self._document

    def _value(self, node: yaml.Node, location: Location) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise YamlError(f"more than {MAX_VALUES} values", _line(node))
        self._document.lines.setdefault(location, _line(node))
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if id(node) in self._open:
            raise YamlError("an alias stands for what it is a part of", _line(node))
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, location)
            return self._sequence(node, location)
        finally:
            self._open.discard(id(node))

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
            key = _key(key_node)
            if key in lines:
                raise YamlError(
                    f"key `{key}` is given twice, in lines {lines[key]} and {_line(key_node)}", _line(key_node)
                )
            lines[key] = _line(key_node)
            self._document.lines[(*location, key)] = _line(key_node)
            own[key] = self._value(value_node, (*location, key))
        return {**merged, **own}


def _merge_sources(node: yaml.Node) -> Iterator[yaml.Node]:
    """The mappings that `<<` takes over; the first one that has a key wins."""
    sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if len(sources) > MAX_MERGED:
        raise YamlError(f"`<<` takes over {len(sources)} objects, and may take over at most {MAX_MERGED}", _line(node))
    for source in sources:
        if not isinstance(source, yaml.MappingNode):
            raise YamlError("`<<` takes over keys of an object, or of a list of objects", _line(node))
        yield source


def _key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise YamlError("a key must be a word", _line(node))
    if node.tag != _STR:
        raise YamlError(f"key {node.value or 'null'} is not a string: write it in quotes", _line(node))
    return _string(node)


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if node.tag == _STR:
        return _string(node)
    if node.tag == _NULL:
        return None
    if node.tag == _BOOL:
        return text.lower() == "true"
    if node.tag == _INT:
        return _integer(node)
    if node.tag == _FLOAT:
        return _float(node)
    if node.tag == _DISPUTED:
        raise YamlError(f"{text} means one thing to YAML 1.2 and another to kubectl: {_instead(text)}", _line(node))
    if node.tag == _MERGE:
        return text
    raise YamlError(f"tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not supported", _line(node))


def _instead(text: str) -> str:
    word = text.lower()
    if word in ("y", "yes", "on"):
        return f"write true, or '{text}' in quotes"
    if word in ("n", "no", "off"):
        return f"write false, or '{text}' in quotes"
    return f"write a decimal number without leading zeros and underscores, or '{text}' in quotes"


def _string(node: yaml.ScalarNode) -> str:
    text: str = node.value
    try:
        # JSON's escapes write a character beyond 16 bits as two halves, which PyYAML leaves apart.
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise YamlError("half a character stands in a string: a lone \\ud800 to \\udfff", _line(node)) from None


def _integer(node: yaml.ScalarNode) -> int:
    text: str = node.value
    # A long row of digits takes Python a long time.
    number = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if len(text) <= 32 else 2**64
    if not -(2**63) <= number < 2**63:
        raise YamlError(f"{text[:40]} is too large for an integer", _line(node))
    return number


def _float(node: yaml.ScalarNode) -> float | int:
    text: str = node.value
    number = math.nan if "n" in text.lower() else float(text)
    if not math.isfinite(number):
        raise YamlError(f"{text[:40]} is not a finite number", _line(node))
    # As kubectl sends it: 1e3 and 1.0 are integers in JSON.
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _no_tag(node: yaml.Node, expected: str) -> None:
    if node.tag != expected:
        raise YamlError(f"tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not supported", _line(node))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
