"""Rank 0's side: takes connections, lets those through to the store that prove the attempt's key, and refuses others.

What a stranger can cost is bounded: it may send a hello's bytes, which are compared as they come, and hold one of a
fixed number of places for seconds (disttrain_api.unproven).
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from disttrain_api.handshake import (
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Hello,
    Refused,
    answer_to,
    check_proof,
    read_hello,
)
from disttrain_api.unproven import Waiting, source_of
from disttrain_trainer.runtime.rendezvous.loop import Loop
from disttrain_trainer.runtime.rendezvous.splice import Splice

_ACCEPTED_AT_ONCE = 64
"""Then those that are through have their turn."""


@dataclass(eq=False)
class _Caller:
    """A connection that has proved nothing yet."""

    connection: socket.socket
    source: str
    hello: Hello | None = None
    received: bytes = b""
    nonce: bytes = b""
    message: bytes = b""
    """The whole hello."""


class Gateway:
    """Listens from the moment it is made, in a thread of its own."""

    def __init__(
        self, listener: socket.socket, store: tuple[str, int], key: bytes, world_size: int, log: Callable[[str], None]
    ) -> None:
        """`store`: address of the store on the loopback interface. `log`: takes a sentence."""
        self._listener, self._store, self._key, self._world_size, self._log = listener, store, key, world_size, log
        self._waiting: Waiting[_Caller] = Waiting()
        self.refused = 0
        """Connections that were no rank's of this attempt."""
        listener.setblocking(False)
        self._loop = Loop("rendezvous gateway", self._tick)
        self._loop.selector.register(listener, selectors.EVENT_READ, self._accept)
        self._loop.start()

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._loop.close()

    def _tick(self, now: float) -> float | None:
        for caller in self._waiting.expired(now):
            self._refuse(caller, "it has not proved in time that it knows the token of this attempt")
        return self._waiting.next_expiry()

    def _accept(self, events: int) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:
                # No descriptor is free: those that wait for nothing give theirs.
                self._make_room()
                return
            connection.setblocking(False)
            caller = _Caller(connection, source_of(address[0]))
            self._loop.selector.register(
                connection, selectors.EVENT_READ, lambda found, caller=caller: self._read(caller)
            )
            pushed_out = self._waiting.add(caller, caller.source, time.monotonic())
            if pushed_out is not None:
                self._refuse(pushed_out, "it held one of many connections that prove nothing")

    def _make_room(self) -> None:
        for caller in self._waiting.expired(float("inf")):
            self._refuse(caller, "no descriptor is free")

    def _read(self, caller: _Caller) -> None:
        if caller.connection.fileno() < 0:
            # It was refused after the selector had found it ready, to make room for another one.
            return
        expected = HELLO_BYTES if caller.hello is None else PROOF_BYTES
        try:
            # Not a byte more: what follows the proof is the store's.
            data = caller.connection.recv(expected - len(caller.received))
            if not data:
                raise Refused("it left before it proved that it knows the token of this attempt")
            caller.received += data
            if caller.hello is None:
                self._read_hello(caller)
            elif len(caller.received) == PROOF_BYTES:
                check_proof(caller.received, caller.message, caller.nonce, self._key)
                self._let_through(caller)
        except (BlockingIOError, InterruptedError):
            return
        except Refused as refusal:
            self._refuse(caller, str(refusal))
        except OSError as error:
            self._refuse(caller, error.strerror or str(error))

    def _read_hello(self, caller: _Caller) -> None:
        hello = read_hello(caller.received, self._world_size)
        if len(caller.received) == HELLO_BYTES:
            caller.hello, caller.message, caller.received = hello, caller.received, b""
            caller.nonce = secrets.token_bytes(NONCE_BYTES)
            # A new connection has room for it.
            caller.connection.send(answer_to(caller.message, caller.nonce, self._key))

    def _let_through(self, caller: _Caller) -> None:
        self._forget(caller)
        inner = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        inner.setblocking(False)
        inner.connect_ex(self._store)
        caller.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        Splice(self._loop.selector, caller.connection, inner)

    def _refuse(self, caller: _Caller, why: str) -> None:
        self._forget(caller)
        caller.connection.close()
        self.refused += 1
        # A flood of them is a few lines.
        if self.refused & (self.refused - 1) == 0:
            count = "" if self.refused == 1 else f" ({self.refused} so far)"
            self._log(f"rendezvous: refused a connection from {caller.source}: {why}{count}")

    def _forget(self, caller: _Caller) -> None:
        self._waiting.remove(caller)
        with suppress(KeyError, ValueError):
            self._loop.selector.unregister(caller.connection)
