"""Connections to a parameter server that prove nothing are few at once, whoever holds them; one that has proved the key
stays.
"""

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq

from disttrain_api.unproven import MAX_WAITING, Waiting
from disttrain_trainer.parameter_server.protocol.sockets import connect, new_context, server_socket
from disttrain_trainer.parameter_server.protocol.wire import key_of, key_with
from disttrain_trainer.parameter_server.server.connection_limit import ConnectionLimit
from disttrain_trainer.parameter_server.server.serve import Loop
from disttrain_trainer.parameter_server.server.server import Server
from tests.unit.trainer.test_parameter_server_manager import configured
from tests.waiting import GENEROUS, until
from tools.cluster.ports import free_port

KEY = key_with(0, key_of("token", "uid", 1))
STRANGERS = MAX_WAITING + 150
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
ANNOUNCED = GREETING + b"\x06" + (2**18).to_bytes(8, "big") + b"x"
"""ZeroMQ makes room for the command of a quarter of a MiB that is said to come."""


class Watched:
    """A server's socket behind its limit. Both give a connection an hour: here its number alone ends one."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.context = new_context(1)
        self.socket = server_socket(self.context, KEY)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, 3_600_000)
        self.limit = ConnectionLimit(self.context, self.socket, self.log.append)
        self.limit._waiting = Waiting(seconds=3600.0)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.strangers: list[socket.socket] = []

    def worker(self) -> zmq.Socket[bytes]:
        return connect(self.context, f"127.0.0.1:{self.port}", KEY)

    def receive(self, worker: zmq.Socket[bytes], message: bytes) -> bytes:
        """Have the worker say something; return as whom the server knows its connection."""
        worker.send(message)
        assert self.socket.poll(GENEROUS * 1000)
        sender, found = self.socket.recv_multipart()
        assert found == message
        return sender

    def hold(self, count: int, sends: bytes) -> None:
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", self.port), GENEROUS)
            self.strangers.append(connection)
            with suppress(ConnectionError):
                connection.sendall(sends)
            connection.setblocking(False)

    def ended(self) -> int:
        """How many of the strangers' connections the server has closed."""
        return sum(map(self._is_ended, self.strangers))

    @staticmethod
    def _is_ended(connection: socket.socket) -> bool:
        try:
            while connection.recv(65536):
                pass
        except BlockingIOError:
            return False
        except ConnectionError:
            pass
        return True


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    yield found
    found.limit.close()
    for stranger in found.strangers:
        stranger.close()
    found.context.destroy(linger=0)


@pytest.mark.parametrize("sends", [b"", GREETING[:20], GREETING, ANNOUNCED])
def test_strangers_hold_so_many_connections_and_no_worker_loses_its_own(watched: Watched, sends: bytes) -> None:
    """Red where nobody is shut out, and where one that has proved the token is."""
    worker = watched.worker()
    known = watched.receive(worker, b"first")
    watched.hold(STRANGERS, sends)
    until(lambda: watched.ended() >= STRANGERS - MAX_WAITING, watched.ended)
    assert watched.limit.held <= MAX_WAITING
    assert watched.receive(worker, b"second") == known, "its connection was ended with those of strangers"
    other = watched.worker()
    assert watched.receive(other, b"hello") not in (b"", known)
    watched.hold(STRANGERS, sends)
    assert watched.receive(worker, b"third") == known
    until(lambda: watched.ended() >= 2 * STRANGERS - MAX_WAITING, watched.ended)
    worker.close()
    other.close()


def test_a_flood_is_a_few_lines(watched: Watched) -> None:
    watched.hold(STRANGERS, b"")
    until(lambda: watched.limit.refused >= STRANGERS - MAX_WAITING, lambda: watched.limit.refused)
    assert watched.log[0] == (
        "parameter server: refused a connection from 127.0.0.1: it held one of many connections that prove nothing"
    )
    assert len(watched.log) <= 10


def test_what_leaves_by_itself_takes_no_place(watched: Watched) -> None:
    watched.hold(MAX_WAITING // 2, GREETING)
    until(lambda: watched.limit.held == MAX_WAITING // 2, lambda: watched.limit.held)
    for stranger in watched.strangers:
        stranger.close()
    until(lambda: watched.limit.held == 0, lambda: watched.limit.held)
    assert watched.limit.refused == 0


def test_a_server_stands_behind_such_a_door(watched: Watched) -> None:
    """Red where the server has none."""
    watched.port = free_port()
    loop = Loop(Server(configured(0)), KEY, f"127.0.0.1:{watched.port}")
    try:
        watched.hold(STRANGERS, b"")
        until(lambda: loop._connections.refused >= STRANGERS - MAX_WAITING, lambda: loop._connections.refused)
    finally:
        loop.close()
