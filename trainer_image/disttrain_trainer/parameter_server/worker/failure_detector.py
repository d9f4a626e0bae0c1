"""How long a server that says nothing is waited for: one that hangs is given up soon, one that is elsewhere is not."""

from dataclasses import dataclass

SILENT_BEATS = 60
"""Beats without an answer after which a server that was there and has answered before counts as hung.

Beats, not seconds: a worker that was itself stopped for a while has sent none.
"""
BEATS_TO_RECONNECT = 10
"""Beats without an answer after which the server is looked up and connected to anew: it may live elsewhere now."""


@dataclass
class FailureDetector:
    """State of one server. `patience`: beats within which it must answer for the first time, and again while it is
    away; `replaceable`: it may be restarted, under another address, and resume."""

    patience: int
    replaceable: bool
    answered: bool = False
    """It has answered before."""
    listening: bool = False
    """Something listens at its address, as far as is known."""
    beats: int = 0
    """Without an answer."""
    ignored: int = 0
    """Those of them that something was there to take in: of a server that comes back, its absence does not count."""

    def beat(self) -> bool:
        """One more goes out. True where the server is to be looked up anew; whether it listens is open then: a host
        that is gone closes no connection."""
        self.ignored += self.listening
        self.beats += 1
        if self.beats % BEATS_TO_RECONNECT:
            return False
        self.listening = False
        return True

    def end(self) -> None:
        """It has answered."""
        self.answered, self.beats, self.ignored = True, 0, 0

    @property
    def failed(self) -> bool:
        """Whether it is waited for no longer."""
        if not self.answered:
            return self.beats >= max(SILENT_BEATS, self.patience)
        if not self.replaceable:
            return self.beats >= SILENT_BEATS
        return self.ignored >= SILENT_BEATS or self.beats >= max(SILENT_BEATS, self.patience)
