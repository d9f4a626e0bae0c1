"""Connections to the API: those within the limits go on to the HTTP server, others end at once."""

import asyncio
from collections.abc import Callable

from disttrain_agent.limits import Admission, Limits


class ConnectionLimiter:
    """A protocol factory for `loop.create_server`. `inner` makes the protocol of a connection that is let in."""

    def __init__(self, inner: Callable[[], asyncio.Protocol], admission: Admission, limits: Limits) -> None:
        self.inner, self.admission, self.limits = inner, admission, limits

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)


class _Connection(asyncio.Protocol):
    """Passes on what a connection sends, up to the limits in bytes and seconds."""

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self._limiter = limiter
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._address = ""
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        loop = asyncio.get_running_loop()
        if not self._limiter.admission.enter(self._address, loop.time()):
            transport.abort()
            return
        self._transport = transport
        self._deadline = loop.call_later(self._limiter.limits.seconds, self._refuse, "time")
        self._inner = self._limiter.inner()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._inner is None:
            return
        if self._received > self._limiter.limits.bytes:
            self._refuse("size")
            return
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
        inner, self._inner = self._inner, None
        if inner is not None:
            self._limiter.admission.leave(self._address)
            inner.connection_lost(error)

    def _refuse(self, reason: str) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._limiter.admission.refused[reason] += 1
            self._transport.abort()
