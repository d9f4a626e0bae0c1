"""A connection ends at its limits, whatever it has not read, and leaves its place once."""

import asyncio
from typing import Any

import pytest

from disttrain_api.connection_limits import Connection, ConnectionLimiter

SECONDS = 0.01


class Limiter(ConnectionLimiter):
    """Admits what a test lets it, and notes what happens."""

    def __init__(self, *, admits: bool = True) -> None:
        super().__init__(asyncio.Protocol, SECONDS, 8)
        self._admits = admits
        self.notes: list[str] = []

    def enter(self, connection: Connection, now: float) -> bool:
        self.notes.append(f"enter {connection.address}")
        return self._admits

    def has_asked(self, connection: Connection) -> None:
        self.notes.append("asked")

    def leave(self, connection: Connection) -> None:
        self.notes.append("leave")

    def refused(self, reason: str) -> None:
        self.notes.append(reason)


class Transport(asyncio.Transport):
    """A connection whose peer reads nothing: `close` waits for it for ever, `abort` does not."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.1", 7)})
        self.aborted = asyncio.Event()
        self._closing = False

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self._closing = True
        self.aborted.set()

    def is_closing(self) -> bool:
        return self._closing


def connected(limiter: Limiter) -> tuple[Any, Transport]:
    connection, transport = limiter(), Transport()
    connection.connection_made(transport)
    return connection, transport


async def test_a_connection_that_closes_and_is_not_read_ends_at_its_time_all_the_same() -> None:
    limiter = Limiter()
    connection, transport = connected(limiter)
    transport.close()
    await asyncio.wait_for(transport.aborted.wait(), 60)
    connection.connection_lost(None)
    assert limiter.notes == ["enter 10.0.0.1", "leave"], "its end was its own: it is not counted as refused"


@pytest.mark.parametrize(("data", "reason"), [(b"", "time"), (b"123456789", "size")])
async def test_a_connection_beyond_a_limit_is_refused_once(data: bytes, reason: str) -> None:
    limiter = Limiter()
    connection, transport = connected(limiter)
    connection.data_received(data)
    await asyncio.wait_for(transport.aborted.wait(), 60)
    connection.connection_lost(None)
    assert limiter.notes == ["enter 10.0.0.1", "leave", reason]


async def test_the_end_of_a_head_is_noticed_in_whatever_pieces_it_comes() -> None:
    limiter = Limiter()
    connection, _ = connected(limiter)
    for piece in (b"A\r", b"\n", b"\r"):
        connection.data_received(piece)
        assert limiter.notes == ["enter 10.0.0.1"]
    connection.data_received(b"\n")
    assert limiter.notes == ["enter 10.0.0.1", "asked"]
    connection.connection_lost(None)


async def test_what_is_not_admitted_has_no_place_to_leave() -> None:
    limiter = Limiter(admits=False)
    connection, transport = connected(limiter)
    assert transport.aborted.is_set()
    connection.data_received(b"1")
    connection.connection_lost(None)
    assert limiter.notes == ["enter 10.0.0.1"]
