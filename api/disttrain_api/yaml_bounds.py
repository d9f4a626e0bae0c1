"""Bounds of an expanded YAML text, checked before anything of it is built; and reading of other YAML files within them.

A few lines can mean billions: an alias costs what it stands for, as often as it stands, and a merge key likewise. So
nodes are counted as they come, and what the aliases among them stand for is added up without following one twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml

from disttrain_api.structural import shorten

MAX_VALUES = 100_000
"""Values in a text. Aliases count as often as they stand."""
MAX_BYTES = 1024 * 1024
"""Bytes of keys and plain values that a text may stand for, if it is no longer itself."""
MAX_DEPTH = 100
"""Objects and lists within each other."""
MAX_MERGED = 100
"""Objects in a list of `<<`."""
MAX_KEY = 1024
"""Characters of a key; YAML itself allows no more in a key that has no `?` before it."""
MAX_NUMBER = 1000
"""Characters of a number."""
MAX_DOCUMENTS = 100

_Made = TypeVar("_Made")
_MAX_PROBLEM = 200
_MERGE, *_NUMBERS = (f"tag:yaml.org,2002:{kind}" for kind in ("merge", "int", "float"))


class YamlError(Exception):
    """A sentence, and the line it is about."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


class BoundedLoader(yaml.SafeLoader):
    """Composes no more values and levels than there may be."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._values = self._depth = 0

    def scan_to_next_token(self) -> None:
        """A tab between words is a blank, as kubectl's reader has it; one that indents is none."""
        super().scan_to_next_token()
        while self.peek() == "\t" and (self.flow_level or not self.allow_simple_key):
            self.forward()
            super().scan_to_next_token()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_key = isinstance(parent, yaml.MappingNode) and index is None
        self._values += not is_key
        if self._values > MAX_VALUES:
            raise YamlError(f"more than {MAX_VALUES} values", self._line())
        return super().compose_node(parent, index)

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        return self._deeper(super().compose_sequence_node, anchor)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        return self._deeper(super().compose_mapping_node, anchor)

    def _deeper(self, compose: Callable[[Any], _Made], anchor: Any) -> _Made:
        if self._depth >= MAX_DEPTH:
            raise _too_deep(self._line())
        self._depth += 1
        node = compose(anchor)
        self._depth -= 1
        return node

    def _line(self) -> int:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        return int(event.start_mark.line) + 1


def compose(text: str, loader: type[BoundedLoader] = BoundedLoader) -> list[yaml.Node]:
    """The roots of a text's documents that are not empty, within all bounds. Raises YamlError."""
    return _in_sentences(lambda: _composed(text, loader), text)


def load(text: str) -> Any:
    """The only document of a text that is no manifest, as PyYAML reads it; None where there is none. Raises YamlError.

    Files that PyYAML or kubectl write need YAML 1.1.
    """
    nodes = compose(text)
    if len(nodes) > 1:
        raise YamlError(f"{len(nodes)} documents, where one is expected", line_of(nodes[1]))
    return _in_sentences(lambda: _constructed(nodes[0]), text) if nodes else None


def line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _composed(text: str, loader: type[BoundedLoader]) -> list[yaml.Node]:
    found: list[yaml.Node] = []
    for count, node in enumerate(yaml.compose_all(text, Loader=loader)):
        if count >= MAX_DOCUMENTS:
            raise YamlError(f"more than {MAX_DOCUMENTS} documents", line_of(node))
        if not (isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"):
            found.append(node)
    _Scale(max(MAX_BYTES, len(text.encode(errors="replace")))).weigh_all(found)
    return found


def _constructed(node: yaml.Node) -> Any:
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except ValueError as error:  # the 99th of a month
        raise YamlError(f"not YAML: {shorten(str(error), _MAX_PROBLEM)}", None) from None


def _in_sentences(read: Callable[[], _Made], text: str) -> _Made:
    try:
        return read()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(_syntax(error), mark.line + 1 if mark else None) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"character {chr(error.character)!r} is not allowed in YAML", line) from None
    except RecursionError:
        raise _too_deep(None) from None


def _syntax(error: yaml.MarkedYAMLError) -> str:
    message = error.problem or "not YAML"
    if "'\\t'" in message:
        return "a tab stands where YAML needs spaces"
    return f"not YAML: {error.context + ', ' if error.context else ''}{shorten(message, _MAX_PROBLEM)}"


def _too_deep(line: int | None) -> YamlError:
    return YamlError(f"nested more than {MAX_DEPTH} levels deep", line)


@dataclass
class _Weight:
    """The expanded size of a node."""

    values: int = 1
    bytes: int = 0
    depth: int = 0

    def add(self, other: "_Weight") -> None:
        self.values += other.values
        self.bytes += other.bytes
        self.depth = max(self.depth, other.depth + 1)


class _Scale:
    """Weighs each node once, however often it stands."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._known: dict[int, _Weight | None] = {}
        """By id; None: it is being weighed."""

    def weigh_all(self, roots: list[yaml.Node]) -> None:
        """Raises YamlError."""
        whole = _Weight(values=0)
        for root in roots:
            whole.add(self._weight(root))
            whole.depth = 0
            self._judge(whole, root)

    def _weight(self, node: yaml.Node) -> _Weight:
        if id(node) in self._known:
            known = self._known[id(node)]
            if known is None:
                raise YamlError("an alias refers to a value that contains it", line_of(node))
            return known
        self._known[id(node)] = None
        weight = self._known[id(node)] = self._weighed(node)
        return weight

    def _weighed(self, node: yaml.Node) -> _Weight:
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _NUMBERS and len(node.value) > MAX_NUMBER:
                raise _too_long("a number", node, MAX_NUMBER)
            return _Weight(bytes=len(node.value) if node.value.isascii() else len(node.value.encode(errors="replace")))
        whole = _Weight(depth=1)
        pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, item) for item in node.value]
        for key, item in pairs:
            if key is not None:
                whole.add(self._weight(key))
                # It is no value of its own.
                whole.values -= 1
                if isinstance(key, yaml.ScalarNode) and len(key.value) > MAX_KEY:
                    raise _too_long("a key", key, MAX_KEY)
            whole.add(self._weight(item))
            self._judge(whole, node)
        return whole

    def _judge(self, weight: _Weight, node: yaml.Node) -> None:
        if weight.depth > MAX_DEPTH:
            raise _too_deep(line_of(node))
        if weight.values > MAX_VALUES:
            raise YamlError(f"more than {MAX_VALUES} values", line_of(node))
        if weight.bytes > self._most_bytes:
            sentence = f"needs more than {self._most_bytes} bytes, with each alias expanded"
            raise YamlError(sentence, line_of(node))


def _too_long(what: str, node: yaml.ScalarNode, most: int) -> YamlError:
    return YamlError(f"{what} of {len(node.value)} characters, and may have at most {most}", line_of(node))
