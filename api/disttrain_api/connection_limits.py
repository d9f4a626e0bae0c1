"""Limits of a port's connections: which may stay, for how long, and how much each may send.

The HTTP servers of the operator and of the agents share it; each decides in a subclass which connections it admits. No
other package is in both images and known to both, so this module alone of the package imports asyncio.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

_END_OF_HEAD = b"\r\n\r\n"


class ConnectionLimiter(ABC):
    """A protocol factory for `loop.create_server`. `inner` makes the protocol that answers an admitted connection."""

    def __init__(self, inner: Callable[[], asyncio.Protocol], seconds: float, max_bytes: int) -> None:
        """`seconds`: how long a connection may last; `max_bytes`: how much it may send."""
        self.inner, self.seconds, self.max_bytes = inner, seconds, max_bytes

    def __call__(self) -> asyncio.Protocol:
        return Connection(self)

    @abstractmethod
    def enter(self, connection: "Connection", now: float) -> bool:
        """Return whether a new connection is admitted; another one may be refused for it."""

    @abstractmethod
    def leave(self, connection: "Connection") -> None:
        """An admitted connection ends; called once."""

    def has_asked(self, connection: "Connection") -> None:  # noqa: B027 - not every server cares
        """The connection has sent the head of a request."""

    def refused(self, reason: str) -> None:  # noqa: B027 - not every server counts
        """An admitted connection is closed because of its `time` or `size`, or has ended within the head of a request:
        `incomplete`, also where that was no HTTP."""


class Connection(asyncio.Protocol):
    """Passes on what a connection sends, up to the limits. `address`: of the peer."""

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self.address = ""
        self._limiter = limiter
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._admitted = False
        self._received = 0
        self._end = b""
        self._has_asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        loop = asyncio.get_running_loop()
        if not self._limiter.enter(self, loop.time()):
            transport.abort()
            return
        self._admitted = True
        self._deadline = loop.call_later(self._limiter.seconds, self.refuse, "time")
        self._inner = self._limiter.inner()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._inner is None:
            return
        if self._received > self._limiter.max_bytes:
            self.refuse("size")
            return
        seen = self._end + data
        self._end = seen[1 - len(_END_OF_HEAD) :]
        if _END_OF_HEAD in seen:
            self._has_asked = True
            self._limiter.has_asked(self)
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
        if self._admitted and self._received and not self._has_asked:
            self._limiter.refused("incomplete")
        self._leave()
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.connection_lost(error)

    def refuse(self, reason: str) -> None:
        """Close it at once, with what is not sent yet; its place is free from now on."""
        assert self._transport is not None
        self._leave()
        if not self._transport.is_closing():
            self._limiter.refused(reason)
        self._transport.abort()

    def _leave(self) -> None:
        if self._admitted:
            self._admitted = False
            self._limiter.leave(self)
