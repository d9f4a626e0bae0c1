"""Checks of what a script reports. Pure: nothing here imports torch, also where a figure is a tensor of torch's."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from disttrain_api.report import MAX_METRICS

MAX_STEP = 2**53
_MAX_NAME = 128


class Figures(NamedTuple):
    """One call of `report`, checked. Figures may still be tensors, which `plain` reads."""

    step: int
    total: int
    loss: Any
    samples_per_second: Any
    others: Mapping[str, Any]


def checked(step: Any, total: Any, loss: Any, samples_per_second: Any, others: Mapping[str, Any]) -> Figures:
    """Return the figures. Raises ValueError that names the first argument which cannot be one.

    No value of a tensor is read: a GPU would be waited for.
    """
    steps = whole("step", step, 0), whole("total", total, 1)
    if steps[0] > steps[1]:
        raise ValueError(f"step is {steps[0]}, expected 0 to total, which is {steps[1]}")
    for name, value in (("loss", loss), ("samples_per_second", samples_per_second)):
        if value is not None:
            _require_number(name, value)
    if len(others) > MAX_METRICS:
        raise ValueError(f"{len(others)} figures besides loss, expected at most {MAX_METRICS}")
    for name, value in others.items():
        if len(name) > _MAX_NAME:
            raise ValueError(f"{name[:20]}… has {len(name)} characters, expected at most {_MAX_NAME}")
        _require_number(name, value)
    return Figures(*steps, loss, samples_per_second, others)


def plain(value: Any) -> float | None:
    """Return a checked figure as a finite float; None for None, inf and nan. Waits for the device of a tensor."""
    if value is None:
        return None
    number = float(value.item()) if hasattr(value, "item") else float(value)
    return number if math.isfinite(number) else None


def whole(name: str, value: Any, least: int) -> int:
    """Return the value as an int. Raises ValueError that names it where it is none, or less than `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} is {_shown(value)}, expected a whole number")
    if not least <= int(value) <= MAX_STEP:
        raise ValueError(f"{name} is {value}, expected {least} to {MAX_STEP}")
    return int(value)


def _require_number(name: str, value: Any) -> None:
    if isinstance(value, bool):
        raise ValueError(f"{name} is {value}, expected a number")
    # A tensor or an array has a shape; of one element it is a number, unless that is complex.
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "item"):
        if math.prod(shape) != 1:
            raise ValueError(f"{name} is {_shown(value)} of shape {tuple(shape)}, expected one number")
        if "complex" in str(getattr(value, "dtype", "")):
            raise ValueError(f"{name} is complex, expected a real number")
    elif not isinstance(value, Real):
        raise ValueError(f"{name} is {_shown(value)}, expected a number")


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if hasattr(value, "shape") else f"{value!r:.40} ({type(value).__name__})"


class Pace:
    """The time that a program's steps take, since the first reported one. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def remaining_seconds(self, step: int, total: int) -> float | None:
        """Return the time until the last step at the pace so far; None before a second step is reported."""
        now = self._clock()
        first, began = self._first = self._first or (step, now)
        return (total - step) * (now - began) / (step - first) if step > first else None
