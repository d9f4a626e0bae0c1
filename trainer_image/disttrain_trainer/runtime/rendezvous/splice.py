"""Pairs of connections: what arrives on one is sent on the other. Gateway and forwarder are made of such pairs."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from functools import partial

_CHUNK_BYTES = 2**18


class Splice:
    """One pair. It reads no faster than the other side takes, and holds at most one chunk per direction."""

    def __init__(self, selector: selectors.BaseSelector, one: socket.socket, other: socket.socket) -> None:
        """Both sockets are non-blocking and not registered; `other` may still be connecting."""
        self._selector, self._sockets = selector, (one, other)
        self._waiting: list[memoryview] = [memoryview(b""), memoryview(b"")]
        """What is to be sent to each of them."""
        self._ended = [False, False]
        """Whether each of them has closed its sending side."""
        self._closed = False
        for index, connection in enumerate(self._sockets):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(connection, selectors.EVENT_READ, partial(self._handle, index))

    def _handle(self, index: int, events: int) -> None:
        if self._closed:
            # The other side's events of the same moment have ended it.
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._send(index)
            if events & selectors.EVENT_READ:
                self._receive(index)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if any(self._ended) and not any(map(len, self._waiting)):
            self.close()

    def _receive(self, index: int) -> None:
        if self._waiting[1 - index]:
            return
        data = self._sockets[index].recv(_CHUNK_BYTES)
        if not data:
            self._ended[index] = True
            self._update(index)
            return
        self._waiting[1 - index] = memoryview(data)
        self._send(1 - index)

    def _send(self, index: int) -> None:
        if self._waiting[index]:
            with suppress(BlockingIOError, InterruptedError):
                sent = self._sockets[index].send(self._waiting[index])
                self._waiting[index] = self._waiting[index][sent:]
        self._update(0)
        self._update(1)

    def _update(self, index: int) -> None:
        """Register a side for reading and writing as far as either can go on now."""
        events = selectors.EVENT_WRITE if self._waiting[index] else 0
        if not self._ended[index] and not self._waiting[1 - index]:
            events |= selectors.EVENT_READ
        connection = self._sockets[index]
        known = self._selector.get_map().get(connection)
        if known is None:
            if events:
                self._selector.register(connection, events, partial(self._handle, index))
        elif events == 0:
            self._selector.unregister(connection)
        elif known.events != events:
            self._selector.modify(connection, events, known.data)

    def close(self) -> None:
        """Close both sides."""
        self._closed = True
        for connection in self._sockets:
            with suppress(KeyError, ValueError):
                self._selector.unregister(connection)
            connection.close()
