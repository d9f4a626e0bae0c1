"""Connections to a parameter server that have proved nothing: how many there may be at once.

ZeroMQ gives a connection ten seconds and one frame to prove that it knows the job's token, and takes any number of
them: each may hold a quarter of a MiB. It says which descriptors it has accepted and closed; beyond so many that have
proved nothing, those of the source with most of them are shut down, as at the rendezvous (unproven.py). What is shut
down ZeroMQ closes by itself, and frees what it held.

What a connection has proved the system knows: a server greets anybody, but says nothing more before the other side has
sent a box that is made for the server's public key, which who lacks the token does not know (CurveZMQ, RFC 26).
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from disttrain_api.unproven import Waiting, source_of

_GONE = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSE_FAILED
_EVENTS = zmq.EVENT_ACCEPTED | _GONE | zmq.EVENT_MONITOR_STOPPED
_GREETING_BYTES = 64
_ACKNOWLEDGED = struct.Struct("Q")
_ACKNOWLEDGED_AT = 120
"""In the tcp_info of Linux (since 4.1): how many of the bytes that were sent have arrived."""
_MARGIN_BYTES = 32


@dataclass(eq=False)
class _Caller:
    """A connection that has proved nothing yet."""

    connection: socket.socket
    """A descriptor of our own for it: ZeroMQ's number may be another connection's by the time that it is looked at."""
    number: int
    """ZeroMQ's descriptor."""
    source: str


class ConnectionLimit:
    """Watches a server's socket, which must not be bound yet, from a thread of its own until it is closed."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], server: zmq.Socket[bytes], log: Callable[[str], None]
    ) -> None:
        """`log`: writes a sentence to the log."""
        self._server, self._log = server, log
        self._waiting: Waiting[_Caller] = Waiting()
        self._of: dict[int, _Caller] = {}
        self.refused = 0
        """Connections that were shut down."""
        address = f"inproc://connections-{id(self)}"
        server.monitor(address, _EVENTS)
        self._events = context.socket(zmq.PAIR)
        # None may get lost.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(address)
        self._thread = threading.Thread(target=self._run, name="connection limit", daemon=True)
        self._thread.start()

    @property
    def held(self) -> int:
        """How many connections have proved nothing, or have done so within the last ten seconds."""
        return len(self._waiting)

    def close(self) -> None:
        """Stop watching."""
        self._server.disable_monitor()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                until = self._waiting.next_expiry()
                patience = None if until is None else max(0.0, until - time.monotonic()) * 1000
                if self._events.poll(patience):
                    event = parse_monitor_message(self._events.recv_multipart())
                    if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                        return
                    self._take(event["event"], event["value"])
                for caller in self._waiting.expired(time.monotonic()):
                    # ZeroMQ has closed it by now, or it has proved what it must.
                    self._forget(caller)
        finally:
            self._events.close(linger=0)
            for caller in list(self._of.values()):
                self._forget(caller)

    def _take(self, event: int, number: int) -> None:
        former = self._of.get(number)
        if former is not None:
            self._forget(former)
        if event != zmq.EVENT_ACCEPTED:
            return
        try:
            connection = socket.socket(fileno=os.dup(number))
        except OSError:
            # It is closed already.
            return
        try:
            caller = _Caller(connection, number, source_of(connection.getpeername()[0]))
        except (OSError, ValueError, IndexError):
            connection.close()
            return
        self._of[number] = caller
        pushed_out = self._waiting.add(caller, caller.source, time.monotonic())
        if pushed_out is not None:
            if not _has_proved(pushed_out.connection):
                self._refuse(pushed_out)
            self._forget(pushed_out)

    def _refuse(self, caller: _Caller) -> None:
        with suppress(OSError):
            caller.connection.shutdown(socket.SHUT_RDWR)
        self.refused += 1
        # A flood of them is a few lines.
        if self.refused & (self.refused - 1) == 0:
            count = "" if self.refused == 1 else f" ({self.refused} so far)"
            why = "it held one of many connections that prove nothing"
            self._log(f"parameter server: refused a connection from {caller.source}: {why}{count}")

    def _forget(self, caller: _Caller) -> None:
        self._waiting.remove(caller)
        if self._of.get(caller.number) is caller:
            del self._of[caller.number]
        caller.connection.close()


def _has_proved(connection: socket.socket) -> bool:
    """Return whether the other side has got more than a greeting, also where the system does not tell."""
    try:
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED_AT + _ACKNOWLEDGED.size)
        (acknowledged,) = _ACKNOWLEDGED.unpack_from(found, _ACKNOWLEDGED_AT)
    except (OSError, AttributeError, struct.error):
        return True
    return bool(acknowledged > _GREETING_BYTES + _MARGIN_BYTES)
