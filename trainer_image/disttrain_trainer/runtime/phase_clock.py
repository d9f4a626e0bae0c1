"""Counts the seconds that this rank spends restoring, evaluating and saving, for the goodput of its job.

The operator asks every ten seconds, and would miss a phase that is shorter.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from disttrain_api.report import PhaseSeconds, RankPhase
from disttrain_api.times import timestamp

_COUNTED: dict[str, str] = {
    RankPhase.RESTORING: "restoring",
    RankPhase.EVALUATING: "evaluating",
    RankPhase.SAVING: "saving",
}


class PhaseClock:
    """Counts from the first phase on. clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase: str | None = None
        self._since = 0.0
        self.seconds: PhaseSeconds | None = None

    def enter(self, phase: str | None) -> PhaseSeconds:
        """Return the seconds of all phases that are over now that this one begins, or goes on."""
        now = self._clock()
        counted = self.seconds or PhaseSeconds(began=timestamp(datetime.now(UTC)))
        if phase != self._phase:
            name = _COUNTED.get(self._phase or "")
            if name is not None:
                counted = counted.model_copy(update={name: getattr(counted, name) + now - self._since})
            self._phase, self._since = phase, now
        self.seconds = counted
        return counted
