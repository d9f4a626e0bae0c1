"""How deep, how many and how long: bounds on what a manifest may hold, found without recursion.

The API server takes JSON that nests a thousand levels deep; most programs, this one too, can neither walk nor compare
it. The schema bounds free-form `config` as far as a schema can (crd.py), and the reader bounds it again, in the same
numbers: objects that were stored before, or by another version of the schema, have to be read, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from disttrain_api.structural import shorten
from disttrain_api.violation import Location, Violation, render


@dataclass(frozen=True)
class Limits:
    """Bounds of a value."""

    depth: int
    """Objects and lists within each other, the outermost included; empty ones and plain values do not count."""
    values: int
    """Values of keys and items of lists, at all depths."""
    bytes: int
    """Bytes of keys and plain values together."""


CONFIG = Limits(depth=6, values=4096, bytes=128 * 1024)
"""Limits on `config` of a model or a data set."""
TASK_CONFIG = Limits(depth=2, values=4096, bytes=128 * 1024)
"""Limits on `config` of a task: each level doubles what the definition of jobs needs to bound it."""
CALLBACKS = Limits(depth=2 + TASK_CONFIG.depth, values=4096, bytes=128 * 1024)
"""Limits on all callbacks together: a list of objects, whose `config` may be as deep as a task's."""
MANIFEST = Limits(depth=64, values=50_000, bytes=1024 * 1024)
"""Limits on a whole job. Its pod templates nest 14 levels deep."""

_FREE_FORM: dict[Location, Limits] = {
    ("spec", "training", "model", "config"): CONFIG,
    ("spec", "training", "data", "config"): CONFIG,
    ("spec", "training", "task", "config"): TASK_CONFIG,
    ("spec", "training", "callbacks"): CALLBACKS,
    ("spec", "training", "evaluation", "choices"): TASK_CONFIG,
    ("spec", "training", "evaluation", "samples"): TASK_CONFIG,
}
# Anything but a string takes about so many: nobody needs to know exactly.
_OTHER_BYTES = 8


def size_problems(raw: Any) -> list[Violation]:
    """Return what is too large in a manifest: at most one violation for each part that has a bound of its own."""
    parts = ((location, excess(_value(raw, location), limits)) for location, limits in _FREE_FORM.items())
    found = [Violation(location, too_much) for location, too_much in parts if too_much is not None]
    if found:
        return found
    whole = excess(raw, MANIFEST)
    return [Violation((), f"the job {whole}")] if whole is not None else []


def excess(value: Any, limits: Limits) -> str | None:
    """Return the first limit that the value exceeds, as the end of a sentence; None where it exceeds none."""
    values = size = 0
    # The keys that lead to where the walk is, and what is left of each container on the way.
    path: list[str | int] = []
    rest: list[Iterator[tuple[str | int, Any]]] = [iter([("", value)])]
    while rest:
        entry = next(rest[-1], None)
        if entry is None:
            rest.pop()
            del path[-1:]
            continue
        key, item = entry
        values, size = values + 1, size + _bytes(item) + (_bytes(key) if isinstance(key, str) else 0)
        if isinstance(item, dict | list) and item:
            if len(rest) > limits.depth:
                where = shorten(render((*path[1:], key)))
                return f"is nested more than {limits.depth} levels deep, at `{where}`: flatten it"
            path.append(key)
            rest.append(_entries(item))
        if values - 1 > limits.values:
            return f"holds more than {limits.values} values, the most that it may hold"
        if size > limits.bytes:
            return f"holds more than {limits.bytes} bytes, the most that it may hold"
    return None


def _entries(container: dict[str, Any] | list[Any]) -> Iterator[tuple[str | int, Any]]:
    yield from container.items() if isinstance(container, dict) else enumerate(container)


def _bytes(item: Any) -> int:
    if isinstance(item, str):
        return len(item) if item.isascii() else len(item.encode(errors="replace"))
    return _OTHER_BYTES


def _value(raw: Any, location: Location) -> Any:
    for part in location:
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw
