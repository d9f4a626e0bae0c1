"""The other ranks' side: a port of the loopback interface whose connections go to rank 0's gateway, with the proof."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from disttrain_api.handshake import ANSWER_BYTES, NONCE_BYTES, Refused, hello_of, proof_for
from disttrain_trainer.runtime.rendezvous.loop import Loop
from disttrain_trainer.runtime.rendezvous.splice import Splice

_CONNECT_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 1.0
_SHARE_OF_WAIT = 0.05
"""A pause may be so much of the time that a rank has waited: the wait gets longer than it has to by as much."""
_TRIES_PER_SECOND = 1000
"""Those of all ranks together, about: rank 0's machine answers them."""


@dataclass(frozen=True)
class Place:
    """Address and key of the rendezvous."""

    host: str
    port: int
    rank: int
    world_size: int
    key: bytes | None
    """None: on the loopback interface, where nothing is proved."""


class Forwarder:
    """Takes connections at `port` from the moment it is made, in a thread of its own."""

    def __init__(self, place: Place, first: socket.socket, seconds: float) -> None:
        """`first`: a connection to the gateway, for the first that comes. `seconds`: to try for, for each other."""
        self._place, self._first, self._seconds = place, [first], seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._loop = Loop("rendezvous forwarder")
        self._loop.selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._loop.start()

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._loop.close()

    def _accept(self, events: int) -> None:
        with suppress(BlockingIOError, ConnectionError):
            inner, _ = self._listener.accept()
            if self._first:
                self._splice(inner, self._first.pop())
            else:
                threading.Thread(target=self._dial, args=(inner,), daemon=True).start()

    def _dial(self, inner: socket.socket) -> None:
        try:
            outer = dial(self._place, self._seconds)
        except (OSError, Refused):
            # The store's client says that its connection is gone.
            inner.close()
        else:
            if not self._loop.call(lambda: self._splice(inner, outer)):
                inner.close()
                outer.close()

    def _splice(self, inner: socket.socket, outer: socket.socket) -> None:
        inner.setblocking(False)
        outer.setblocking(False)
        Splice(self._loop.selector, inner, outer)


def dial(place: Place, seconds: float, log: Callable[[str], None] = lambda sentence: None) -> socket.socket:
    """Return a connection to the gateway, of which each side has proved that it knows the key.

    Tries again for so many seconds: rank 0 may start later, and its name resolve later. Raises OSError or Refused with
    what was wrong last. `log`: takes a sentence, of the first refusal.
    """
    began, pause, refused = time.monotonic(), _FIRST_PAUSE_SECONDS, False
    deadline = began + seconds
    while True:
        try:
            return _try(place, max(0.1, min(_CONNECT_SECONDS, deadline - time.monotonic())))
        except (OSError, Refused) as error:
            if time.monotonic() + pause > deadline:
                raise
            if isinstance(error, Refused) and not refused:
                refused = True
                log(f"rendezvous: {place.host}:{place.port}: {error}; trying again for {seconds:g} s")
        time.sleep(pause)
        pause = next_pause(pause, time.monotonic() - began, place.world_size)


def next_pause(former: float, waited: float, world_size: int) -> float:
    """Return the seconds until the next try, by those before the last one and those that all have taken so far."""
    bound = max(_FIRST_PAUSE_SECONDS, _SHARE_OF_WAIT * waited, world_size / _TRIES_PER_SECOND)
    return min(2 * former, bound, _LONGEST_PAUSE_SECONDS)


def _try(place: Place, seconds: float) -> socket.socket:
    assert place.key is not None
    connection = socket.create_connection((place.host, place.port), seconds)
    try:
        hello = hello_of(place.rank, place.world_size, secrets.token_bytes(NONCE_BYTES))
        connection.sendall(hello)
        connection.sendall(proof_for(hello, _read(connection, ANSWER_BYTES), place.key))
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def _read(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        data = connection.recv(length - len(received))
        if not data:
            raise Refused("what listens there has closed the connection")
        received += data
    return received
