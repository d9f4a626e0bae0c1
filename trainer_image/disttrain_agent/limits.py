"""Limits of the agent's API. Pure: times are arguments."""

from collections import Counter, OrderedDict
from dataclasses import dataclass

_ADDRESSES = 1024
"""Addresses whose connections are counted; the one that was heard least recently is forgotten."""


@dataclass(frozen=True)
class Limits:
    """Bounds of the API. Per connection: one request."""

    connections: int = 64
    """Connections that may be open at one time."""
    connections_of_address: int = 16
    """The same, from one address."""
    connections_per_second: float = 20.0
    """New connections that one address may make."""
    requests_per_second: float = 20.0
    """Requests with the right token that are answered; as many again of those with a proof alone."""
    seconds: float = 10.0
    """How long a connection may last."""
    bytes: int = 16 * 1024
    """How much a connection may send: request line, headers and body."""


class Bucket:
    """A token bucket: `rate` per second, and as many as two seconds' worth at once."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate, self._most = rate, max(1.0, 2 * rate)
        self._left, self._at = self._most, now

    def take(self, now: float) -> bool:
        """Return whether one more is within the rate."""
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Admission:
    """Which connections are let in."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()
        self._rates: OrderedDict[str, Bucket] = OrderedDict()
        self.refused: Counter[str] = Counter()
        """By the reason."""

    def enter(self, address: str, now: float) -> bool:
        """Return whether a connection from `address` is let in; it then leaves by `leave`."""
        limits = self._limits
        full = self._open.total() >= limits.connections or self._open[address] >= limits.connections_of_address
        if full or not self._rate(address, now).take(now):
            self.refused["connections"] += 1
            return False
        self._open[address] += 1
        return True

    def leave(self, address: str) -> None:
        """A connection that was let in has ended."""
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def _rate(self, address: str, now: float) -> Bucket:
        bucket = self._rates.pop(address, None) or Bucket(self._limits.connections_per_second, now)
        self._rates[address] = bucket
        if len(self._rates) > _ADDRESSES:
            self._rates.popitem(last=False)
        return bucket
