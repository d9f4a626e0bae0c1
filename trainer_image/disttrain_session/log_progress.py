"""Reads progress from what a program prints, by the job's rules. Pure.

A program prints anything: a line of any length, bytes that are no text, progress bars that overwrite themselves. What
is kept of a line, and how many lines are looked at, is bounded; what is no number is passed by.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from disttrain_api.log_rules import GROUPS, LOSS, SAMPLES_PER_SECOND, STEP, TOTAL_STEPS, number, whole
from disttrain_session.reported_values import Figures, checked

MAX_LINE_BYTES = 4096
"""As much of a line is looked at."""
LINES_PER_SECOND = 1000
"""As many lines are looked at; the next ones are passed by until the second is over."""

_END = re.compile(rb"[\r\n]")
# Colours and cursors; titles and links.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


class Lines:
    """Cuts a stream into lines. A carriage return ends one, too: progress bars overwrite themselves with it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the lines that have come to their end, without control codes."""
        first, *others = _END.split(data)
        self._keep(first)
        for part in others:
            yield from self.finish()
            self._keep(part)

    def finish(self) -> Iterator[str]:
        """Yield the line whose end has come, unless it is empty."""
        text = _CONTROL.sub("", self._rest.decode(errors="replace")).strip()
        self._rest = b""
        if text:
            yield text

    def _keep(self, part: bytes) -> None:
        self._rest += part[: MAX_LINE_BYTES - len(self._rest)]


class LogProgress:
    """What the lines so far say by the rules. Figures of several lines add up to one report.

    expressions: compiled rules. total_steps: None, a group of the rules reads them. clock: seconds that only grow.
    """

    def __init__(self, expressions: Sequence[Any], total_steps: int | None, clock: Callable[[], float]) -> None:
        self._expressions, self._clock = expressions, clock
        self._steps: dict[str, int] = {} if total_steps is None else {TOTAL_STEPS: total_steps}
        self._figures: dict[str, float] = {}
        self._second, self._looked_at = clock(), 0

    def read(self, line: str) -> Figures | None:
        """Return the figures after this line; None where it says nothing, or steps are not known yet."""
        if not self._has_time():
            return None
        # Every rule is tried, also where the first one has found something.
        found = [self._take(match.groupdict()) for each in self._expressions if (match := each.search(line))]
        if not any(found) or not {STEP, TOTAL_STEPS} <= self._steps.keys():
            return None
        others = {name: value for name, value in self._figures.items() if name not in GROUPS}
        loss, rate = self._figures.get(LOSS), self._figures.get(SAMPLES_PER_SECOND)
        try:
            return checked(self._steps[STEP], self._steps[TOTAL_STEPS], loss, rate, others)
        except ValueError:
            # A step beyond the last one, for example of an evaluation.
            return None

    def _take(self, groups: dict[str, str | None]) -> bool:
        """Take the numbers of a match; False where there are none, or one of its steps is none."""
        texts = {name: text for name, text in groups.items() if text is not None}
        steps = {name: whole(text) for name, text in texts.items() if name in (STEP, TOTAL_STEPS)}
        figures = {name: number(text) for name, text in texts.items() if name not in steps}
        if None in steps.values():
            return False
        taken: dict[str, float] = {name: value for name, value in figures.items() if value is not None}
        self._steps |= {name: value for name, value in steps.items() if value is not None}
        self._figures |= taken
        return bool(steps or taken)

    def _has_time(self) -> bool:
        now = self._clock()
        if now - self._second >= 1:
            self._second, self._looked_at = now, 0
        self._looked_at += 1
        return self._looked_at <= LINES_PER_SECOND
