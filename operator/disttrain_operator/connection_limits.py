"""Limits of connections, bytes and time on the port of health and metrics.

Anybody in the cluster may reach the port unless a NetworkPolicy forbids it, and the kubelet's probe, which comes from
any address and proves nothing else, must be answered whoever is there before it. So nobody is turned away:
where all places are taken, the newest connection gets the place of the oldest that has not asked for anything yet. A
probe asks at once and is answered in the next turns of the loop. Of connections that come at the same moment a few are
let in per turn (`AT_A_TIME`), so that many turns pass before a place is taken from it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

_END_OF_HEAD = b"\r\n\r\n"
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


class ConnectionLimiter:
    """A protocol factory for `loop.create_server`. `inner` makes the protocol that answers on a connection."""

    def __init__(self, inner: Callable[[], asyncio.Protocol], limits: Limits) -> None:
        self.inner, self.limits = inner, limits
        self._waiting: dict[_Connection, None] = {}
        """Those that have not asked yet, the oldest first."""
        self._asked: dict[_Connection, None] = {}
        """Those that have, and are being answered."""

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)

    def __len__(self) -> int:
        """How many connections are open."""
        return len(self._waiting) + len(self._asked)

    def enter(self, connection: "_Connection") -> None:
        """A connection is made. One that is in its way is closed."""
        if len(self) >= self.limits.connections:
            next(iter(self._waiting or self._asked)).refuse()
        self._waiting[connection] = None

    def asks(self, connection: "_Connection") -> None:
        """The connection has sent a whole request."""
        if connection in self._waiting:
            del self._waiting[connection]
            self._asked[connection] = None

    def leave(self, connection: "_Connection") -> None:
        """The connection has ended, or ends."""
        self._waiting.pop(connection, None)
        self._asked.pop(connection, None)


class _Connection(asyncio.Protocol):
    """Passes on what a connection sends, up to the limits."""

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self._limiter = limiter
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._received = 0
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._deadline = asyncio.get_running_loop().call_later(self._limiter.limits.seconds, self.refuse)
        self._limiter.enter(self)
        self._inner = self._limiter.inner()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._inner is None:
            return
        if self._received > self._limiter.limits.bytes:
            self.refuse()
            return
        seen = self._end + data
        self._end = seen[1 - len(_END_OF_HEAD) :]
        if _END_OF_HEAD in seen:
            self._limiter.asks(self)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._limiter.leave(self)
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.connection_lost(error)

    def refuse(self) -> None:
        """Close it at once. Its place is free from now on."""
        self._limiter.leave(self)
        if self._transport is not None:
            self._transport.abort()
