"""Connections that have proved nothing yet: how many there may be, for how long, and whose go first. Pure.

A stranger can hold no more of them than there are, and pushes out its own first: the source with most of them loses its
oldest one. So a rank, whose handshake takes two round trips, is pushed out only by as many sources at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

MAX_WAITING = 256
WAITING_SECONDS = 10.0
_SUBNET_BITS = 64
"""Who has one IPv6 address has all of its subnet."""


class Waiting(Generic[C]):
    """The connections in order of their arrival, by source."""

    def __init__(self, most: int = MAX_WAITING, seconds: float = WAITING_SECONDS) -> None:
        self._most, self._seconds = most, seconds
        self._all: OrderedDict[C, tuple[str, float]] = OrderedDict()
        self._of: dict[str, OrderedDict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: C, source: str, now: float) -> C | None:
        """Remember a connection. Returns the one that must go instead, if there are too many."""
        self._all[connection] = (source, now + self._seconds)
        self._of.setdefault(source, OrderedDict())[connection] = None
        if len(self._all) <= self._most:
            return None
        # The first of equals has waited longest: sources stand in the order in which they came.
        largest = max(self._of.values(), key=len)
        pushed_out = next(iter(largest))
        self.remove(pushed_out)
        return pushed_out

    def remove(self, connection: C) -> None:
        """Forget a connection, if it is remembered."""
        found = self._all.pop(connection, None)
        if found is None:
            return
        own = self._of[found[0]]
        del own[connection]
        if not own:
            del self._of[found[0]]

    def expired(self, now: float) -> list[C]:
        """Return, and forget, the connections whose time is over."""
        found = []
        for connection, (_, until) in self._all.items():
            if until > now:
                break
            found.append(connection)
        for connection in found:
            self.remove(connection)
        return found

    def next_expiry(self) -> float | None:
        """Return when the next one's time is over; None where there is none."""
        return next((until for _, until in self._all.values()), None)


def source_of(address: str) -> str:
    """Return what counts as one source: an IPv4 address, or the subnet of an IPv6 address."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ip_network((found, _SUBNET_BITS), strict=False))
    return str(found)
