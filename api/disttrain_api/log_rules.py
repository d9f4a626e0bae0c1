"""`spec.progress`: how the progress of a program that does not report is read from its output."""

import re
from typing import Annotated, Any

from pydantic import Field

from disttrain_api.base import ApiModel

STEP, TOTAL_STEPS, LOSS, SAMPLES_PER_SECOND = GROUPS = ("step", "totalSteps", "loss", "samplesPerSecond")
"""Groups with a meaning of their own, as the fields of `status.progress`. Others are figures."""

_MAX_DIGITS = 32
_MAX_BYTES = 256 * 1024
"""The most memory of a compiled expression. Some of 300 characters would take 8 MiB and 0.2 s to compile."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?|[-+]?(?:nan|inf|infinity)", re.I)
_NAMED = re.compile(r"\(\?P<(\w+)>")


class LogRule(ApiModel):
    """Reads numbers from each line in which its pattern is found."""

    pattern: Annotated[str, Field(min_length=1, max_length=300)]
    """An RE2 expression. Its named groups are numbers: `step`, `totalSteps`, `loss`, `samplesPerSecond`; any other name
    is a figure of its own. For example: iter (?P<step>[0-9]+): loss (?P<loss>[0-9.]+)"""


class LoggedProgress(ApiModel):
    """How progress is read from the output of the first worker's command."""

    log_rules: Annotated[list[LogRule], Field(min_length=1, max_length=8)]
    """Each line is looked at by all of them."""
    total_steps: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """Steps to do. Absent: the group `totalSteps` of a rule reads them."""


def compiled(pattern: str) -> Any:
    """Return the compiled expression. Raises ValueError that says why where it is none.

    RE2 takes time that is linear in the line, whatever the expression; it is also what CEL's `matches` reads.
    """
    # Loaded where a job has such rules.
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_BYTES
    try:
        expression = re2.compile(pattern, options=options)
    except re2.error as error:
        (why,) = error.args
        raise ValueError(why.decode(errors="replace") if isinstance(why, bytes) else str(why)) from None
    names = _NAMED.findall(pattern)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"duplicate group name: {twice[0]}")
    return expression


def number(text: str) -> float | None:
    """Return the decimal number that a program has printed; None where it is none. nan and inf are some."""
    # A long row of digits takes Python a long time.
    return float(text) if len(text) <= _MAX_DIGITS and _NUMBER.fullmatch(text) else None


def whole(text: str) -> int | None:
    """Return the number of steps that a program has printed; None where it is none."""
    return int(text) if len(text) <= _MAX_DIGITS and text.isascii() and text.isdigit() else None
