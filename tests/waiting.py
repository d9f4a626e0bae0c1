"""The one way in which tests wait: on a condition, with a limit that only something that hangs reaches."""

import time
from collections.abc import Callable
from typing import TypeVar

from tests.suites import GATE

GENEROUS = 60.0 if GATE else 600.0
"""Seconds. What the gate waits for takes moments, also beside busy cores; the complete suite's machine may have ten
times as much to do as it has cores."""
Answer = TypeVar("Answer")


def until(
    condition: Callable[[], Answer], why: Callable[[], object] | str = "", *, seconds: float = GENEROUS
) -> Answer:
    """Return the first answer of `condition` that is true. Raises AssertionError with `why` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"still not so after {seconds} s: {why() if callable(why) else why}")
        time.sleep(0.01)
    return answer
