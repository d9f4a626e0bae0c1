"""What strangers send to a parameter server costs nobody anything: no memory, no answer, and nothing of it is believed,
also where it is the job's own traffic, changed or sent again.
"""

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.parameter_server.protocol.codec import PlainCodec
from disttrain_trainer.parameter_server.protocol.tasks import Result, Task
from disttrain_trainer.parameter_server.worker.client import Servers
from disttrain_trainer.parameter_server.worker.payload import GradientPayload
from tests import hostile_peer
from tests.hostile_peer import Outcome, Peer
from tests.unit.trainer.lone_server import KEY
from tools.cluster.ports import free_port

MIB = 2**20
NUMBERS = 3 * MIB
"""Size of the worker's one parameter: 12 MiB, and so several frames of several buckets."""


class Serving:
    """A server as a process of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "tests.unit.trainer.lone_server", f"127.0.0.1:{self.port}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "listens\n"

    def most(self) -> int:
        """The most memory that it has had, where the system says so; else what it has."""
        status = Path(f"/proc/{self.process.pid}/status")
        if not status.exists():
            return psutil.Process(self.process.pid).memory_info().rss
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def serving() -> Iterator[Serving]:
    found = Serving()
    yield found
    found.close()


class Worker:
    """The one worker of the server."""

    def __init__(self, port: int) -> None:
        self.parameters = {"w": nn.Parameter(torch.zeros(NUMBERS))}
        self.servers = Servers([f"127.0.0.1:{port}"], KEY, 0, self.parameters, lambda: False, 60.0)
        self.payload = GradientPayload(self.servers.placement, self.parameters, PlainCodec())

    def begin(self) -> None:
        self.servers.hello(9)
        self.servers.load({})
        self.servers.start(0, Cursor(), 9)

    def step(self) -> float:
        """Push a gradient of ones, and pull: how far the first number has gone, and all others with it."""
        answer = self.servers.next()
        assert isinstance(answer.task, Task)
        pulled = self.servers.pull(answer.complete)
        self.parameters["w"].grad = torch.ones(NUMBERS)
        self.servers.push(answer.task, 1.0, pulled, answer.floor, self.payload)
        self.servers.next((answer.task, Result(0.0, 1.0, 1.0)))
        self.servers.pull(answer.complete + 1)
        values = self.parameters["w"].detach()
        assert bool((values == values[0]).all()), "numbers that nobody has pushed"
        return float(values[0])

    def figures(self) -> dict[str, Any]:
        """What the server counts: its version, and the messages that it has taken."""
        found = self.servers.figures()[0].fields
        return {name: found[name] for name in ("version", "counters", "staleness", "late", "dropped")}


def zmtp(*frames: tuple[int, bytes]) -> bytes:
    """A client's part of a ZMTP 3.1 connection without security (RFC 37), and frames with their flags."""
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" * 32
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return greeting + b"\x04" + bytes([len(ready)]) + ready + b"".join(_frame(*one) for one in frames)


def _frame(flags: int, body: bytes) -> bytes:
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


MORE = 1


def flood(port: int, first: bytes, block: bytes, blocks: int) -> int:
    """Send blocks until there are so many, or the other side will have no more. Returns the bytes that it took."""
    sent = 0
    with socket.create_connection(("127.0.0.1", port), 60.0) as connection, suppress(ConnectionError):
        connection.sendall(first)
        for _ in range(blocks):
            connection.sendall(block)
            sent += len(block)
    return sent


GREETING = 64
ANSWERED = 512
"""Bytes: a server's greeting and its welcome are half of that."""


def replay(port: int, first: bytes, *parts: bytes) -> int:
    """Send these until the server closes the connection, or answers. Returns the bytes that came back by then."""
    received = 0
    with socket.create_connection(("127.0.0.1", port), 60.0) as connection, suppress(ConnectionError):
        connection.sendall(first[:GREETING])
        # ZeroMQ closes a connection on which more comes before it has greeted.
        while received < GREETING and (data := connection.recv(GREETING)):
            received += len(data)
        sender = threading.Thread(target=send, args=(connection, (first[GREETING:], *parts)))
        sender.start()
        try:
            while received < ANSWERED and (data := connection.recv(65536)):
                received += len(data)
        finally:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            sender.join()
    return received


def send(connection: socket.socket, parts: tuple[bytes, ...]) -> None:
    with suppress(OSError):
        for part in parts:
            connection.sendall(part)


# The begin of a worker's connection, after which it says that it knows the server's key.
CURVE = zmtp()[:64].replace(b"NULL".ljust(20, b"\0"), b"CURVE".ljust(20, b"\0"))
# Each frame is one that a server would take of a worker.
SMALL = b"x" * (200 * 1024)
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "messages of one frame": (zmtp(), 5 * _frame(0, SMALL)),
    "frames of one message without an end": (zmtp(), 5 * _frame(MORE, SMALL)),
    "one frame of a gigabyte": (zmtp() + b"\x02" + struct.pack(">Q", 2**30), b"x" * MIB),
    "a command of a gigabyte": (zmtp()[:64] + b"\x06" + struct.pack(">Q", 2**30), b"x" * MIB),
    "a command of a gigabyte to a server that waits for one": (CURVE + b"\x06" + struct.pack(">Q", 2**30), b"x" * MIB),
    "the frames of ZMTP 1.0": (b"\x01\0", b"\xff" + struct.pack(">Q", MIB + 1) + b"\0" + b"x" * MIB),
    "nothing known": (b"", b"\0" * MIB),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_what_strangers_send_stays_nowhere(serving: Serving, kind: str) -> None:
    """Red without the bound on a frame: of the kind that the server waits for it would be kept."""
    worker = Worker(serving.port)
    worker.begin()
    moved, before = worker.step(), serving.most()
    senders = [threading.Thread(target=flood, args=(serving.port, *FLOODS[kind], 200)) for _ in range(4)]
    for sender in senders:
        sender.start()
    steps = [worker.step() for _ in range(3)]
    for sender in senders:
        sender.join()
    # A push and its parts are in memory for a moment, too; 800 MiB were sent.
    assert serving.most() - before < 200 * MIB
    assert steps == [pytest.approx(count * moved, rel=1e-5) for count in (2, 3, 4)]
    worker.servers.close()


def test_half_open_connections_keep_no_worker_out(serving: Serving) -> None:
    peer = Peer("127.0.0.1", serving.port)
    hostile_peer.half_open(peer, Outcome(""))
    worker = Worker(serving.port)
    worker.begin()
    moved, before = worker.step(), serving.most()
    hostile_peer.garbage(peer, Outcome(""))
    hostile_peer.churn(peer, Outcome(""))
    assert worker.step() == pytest.approx(2 * moved, rel=1e-5)
    assert serving.most() - before < 200 * MIB
    assert serving.process.poll() is None
    worker.servers.close()
    for connection in peer.held:
        connection.close()


class Between:
    """A machine between worker and server: passes on, remembers and changes what the worker sends."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent: list[bytearray] = []
        """What the worker has sent on each connection."""
        self.change: Callable[[bytes], bytes] = lambda data: data
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                worker, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                kept = bytearray()
                self.sent.append(kept)
                threading.Thread(target=self._pass_on, args=(worker, server, kept), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, worker, None), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if kept is not None:
                    kept += data
                    data = self.change(data)
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def between(serving: Serving) -> Iterator[Between]:
    found = Between(serving.port)
    yield found
    found.close()


def test_recorded_messages_cannot_be_replayed(serving: Serving, between: Between) -> None:
    """Red without CURVE: the server answers them, and counts them as the worker's."""
    worker = Worker(between.port)
    worker.begin()
    worker.step()
    # All that was said so far: said again after a further step, it would lead back to this one.
    recorded = [bytes(kept) for kept in between.sent]
    moved, figures = worker.step(), worker.figures()
    for one in recorded:
        assert replay(serving.port, one) < ANSWERED, "it is answered"
        # Also within a connection that the server knows: all but how it began.
        assert replay(serving.port, one[:1024], *[one[1024:]] * 3) < ANSWERED, "it is answered"
    assert worker.figures() == figures
    worker.servers.pull()
    assert float(worker.parameters["w"].detach()[0]) == moved
    worker.servers.close()


def test_a_changed_tensor_is_refused_and_sent_again(serving: Serving, between: Between) -> None:
    """One bit of one block, in the middle of a push: the connection ends, and the worker's next one has it whole. Red
    without CURVE."""
    worker = Worker(between.port)
    worker.begin()
    moved = worker.step()
    left = [20]

    def change(data: bytes) -> bytes:
        # Large blocks are those of tensors.
        left[0] -= len(data) > 30_000
        if left[0] != 0:
            return data
        left[0] = -1
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        return bytes(changed)

    between.change = change
    connections = len(between.sent)
    assert worker.step() == pytest.approx(2 * moved, rel=1e-5)
    assert left[0] < 0, "nothing was changed"
    assert len(between.sent) > connections, "the server went on with the connection"
    worker.servers.close()
