"""Values of others for a page: short texts that only have a shape, and numbers that JSON and JavaScript can hold."""

import math
from collections.abc import Mapping
from typing import Any

from disttrain_api.bounds import cut
from disttrain_api.escape import escaped

MAX_TEXT = 2048
MAX_NAME = 256
_LARGEST = 2**53


def text(value: Any, most: int = MAX_TEXT) -> str:
    """Return a text as one line of at most `most` bytes: control characters and marks of direction are escapes.

    "" for what is no text.
    """
    return cut(escaped(value[:most]), most) if isinstance(value, str) else ""


def name(value: Any) -> str:
    """Return a short text."""
    return text(value, MAX_NAME)


def number(value: Any) -> float | int | None:
    """Return a finite number within what JavaScript counts exactly; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if isinstance(value, int):
        return max(-_LARGEST, min(value, _LARGEST))
    return value


def part(value: Any, *path: str) -> Any:
    """Return what is at `path` of nested objects; None where there is nothing."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
