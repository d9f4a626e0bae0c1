"""Limits of connections, bytes and time on the port of health and metrics.

Anybody in the cluster may reach the port unless a NetworkPolicy forbids it, and the kubelet's probe, which comes from
any address and proves nothing else, must be answered whatever connections exist before it. So no connection is turned
away: where all places are taken, the newest gets the place of the oldest that has not asked for anything yet. A
probe asks at once and is answered in the next turns of the loop. A few of the connections that come at the same moment
are let in per turn (`AT_A_TIME`), so that many turns pass before a place is taken from it.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass

from disttrain_api import connection_limits
from disttrain_api.connection_limits import Connection

AT_A_TIME = 32
"""Connections that are accepted in one turn of the loop."""


@dataclass(frozen=True)
class Limits:
    """Bounds of the port. Per connection: one request."""

    connections: int = 256
    """Connections that may be open at one time."""
    seconds: float = 10.0
    """How long a connection may last."""
    bytes: int = 16 * 1024
    """How much a connection may send: request line and headers. No request has a body."""


class ConnectionLimiter(connection_limits.ConnectionLimiter):
    """Admits every connection; one that has not asked yet makes room for it."""

    def __init__(self, inner: Callable[[], asyncio.Protocol], limits: Limits) -> None:
        super().__init__(inner, limits.seconds, limits.bytes)
        self._connections = limits.connections
        self._waiting: dict[Connection, None] = {}
        """Those that have not asked yet, the oldest first."""
        self._asked: dict[Connection, None] = {}
        """Those that have, and are being answered."""

    def __len__(self) -> int:
        """How many connections are open."""
        return len(self._waiting) + len(self._asked)

    def enter(self, connection: Connection, now: float) -> bool:
        if len(self) >= self._connections:
            next(iter(self._waiting or self._asked)).refuse("connections")
        self._waiting[connection] = None
        return True

    def has_asked(self, connection: Connection) -> None:
        if connection in self._waiting:
            del self._waiting[connection]
            self._asked[connection] = None

    def leave(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._asked.pop(connection, None)


def everywhere(port: int) -> socket.socket:
    """Return one listening socket for all addresses: a kubelet asks a pod at its first one, of IPv4 or IPv6."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=AT_A_TIME, dualstack_ipv6=True)
        except OSError as error:
            # The kernel may support IPv6 and have it switched off.
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=AT_A_TIME)
