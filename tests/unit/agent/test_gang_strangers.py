"""The port on which worker 0's agent leads a gang: who is heard there, and what others can do."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

import pytest

from disttrain_agent.gang import channel as channels
from disttrain_agent.gang.channel import MAX_LINE_BYTES, Channel, follow
from disttrain_agent.gang.follow import FollowingAgent
from disttrain_agent.gang.lead import LeadingAgent
from disttrain_agent.gang.leader import Leader
from disttrain_agent.gang.messages import Kind, Message, PodFailure
from disttrain_agent.restart import Limits
from disttrain_api.attempt_key import attempt_key
from disttrain_api.handshake import HELLO_BYTES, Refused, hello_of
from disttrain_api.report import RankFailure
from disttrain_api.unproven import MAX_WAITING
from tests.waiting import GENEROUS

KEY = attempt_key("a token of the job", "gang", "uid-1", 1)
WORKERS = 3
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
KILLED = PodFailure(cause=RankFailure(rank=1, exit_code=137, signal=9))


class Port:
    """Worker 0's agent, and connections to it."""

    def __init__(self, leader: Leader | None = None, workers: int = WORKERS) -> None:
        self.log: list[str] = []
        self.leader = leader or Leader(workers, Limits(3, 0), 1.0, 60.0, 900.0)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        self.agent = LeadingAgent(self.leader, lambda: None, self.log.append, KEY, workers, listener, lambda: NOW)
        self._open: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address, limit=MAX_LINE_BYTES)
        self._open.append(writer)
        return reader, writer

    async def member(self, worker: int = 1, key: bytes = KEY, workers: int = WORKERS) -> Channel:
        """A connection that has proved what it can prove."""
        return await follow(*await self.connect(), key, worker, workers)

    async def joined(self, worker: int = 1) -> Channel:
        found = await self.member(worker)
        found.send(Message(kind=Kind.JOINS, generation=0))
        await until(lambda: worker in self.leader._present)
        return found

    def close(self) -> None:
        self.agent.close()
        for writer in self._open:
            with contextlib.suppress(RuntimeError):
                writer.transport.abort()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(GENEROUS):
        while not condition():  # noqa: ASYNC110 - conditions of any kind, nobody sets an event
            await asyncio.sleep(0.005)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection; whether it came without a byte."""
    async with asyncio.timeout(GENEROUS):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    port = Port()
    yield port
    port.close()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handshakes and silences may take no time to speak of."""
    monkeypatch.setattr("disttrain_agent.gang.lead.HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setattr(channels, "SILENT_SECONDS", 0.2)


GARBAGE = {
    "http": b"GET /v1/status HTTP/1.1\r\n\r\n",
    "nothing": b"",
    "half a hello": hello_of(1, WORKERS, b"n" * 32)[:-1],
    "a hello and no proof": hello_of(1, WORKERS, b"n" * 32),
    "a hello and a wrong proof": hello_of(1, WORKERS, b"n" * 32) + b"p" * 32,
    "of another world": hello_of(1, WORKERS + 1, b"n" * 32) + b"p" * 32,
    "a line without an end": b"x" * 10 * MAX_LINE_BYTES,
}


@pytest.mark.parametrize("sent", GARBAGE.values(), ids=GARBAGE)
async def test_who_proves_nothing_is_refused_and_counted(port: Port, sent: bytes) -> None:
    reader, writer = await port.connect()
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(GENEROUS):
        with contextlib.suppress(ConnectionError):
            await reader.read()
    await until(lambda: port.agent.refused == 1)
    assert "gang: refused a connection from 127.0.0.1" in port.log[0]
    assert port.leader._present == {0}


async def test_who_says_nothing_or_half_of_it_is_refused_in_time(port: Port, brief: None) -> None:
    for sent in (b"", hello_of(1, WORKERS, b"n" * 32)[: HELLO_BYTES // 2], hello_of(1, WORKERS, b"n" * 32)):
        reader, writer = await port.connect()
        writer.write(sent)
        await asyncio.wait_for(reader.read(), GENEROUS)
    await until(lambda: port.agent.refused == 3)


@pytest.mark.parametrize(
    ("worker", "key"),
    [
        (1, attempt_key("another token", "gang", "uid-1", 1)),
        (1, attempt_key("a token of the job", "gang", "uid-1", 2)),
        (1, attempt_key("a token of the job", "rendezvous", "uid-1", 1)),
        (1, attempt_key("a token of the job", "gang", "uid-2", 1)),
    ],
    ids=["another token", "another attempt", "the rendezvous's key", "another job"],
)
async def test_another_key_is_refused_by_both_sides(port: Port, worker: int, key: bytes) -> None:
    with pytest.raises(Refused, match="does not know the token of this attempt"):
        await port.member(worker, key)
    assert port.leader._present == {0}


@pytest.mark.parametrize("worker", [0, WORKERS, 2**32 - 1])
async def test_no_agent_takes_the_place_of_worker_0_or_of_none(port: Port, worker: int) -> None:
    with pytest.raises(Refused):
        await port.member(worker)
    await until(lambda: port.agent.refused == 1)


async def test_many_connections_that_prove_nothing_keep_no_agent_out(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disttrain_agent.gang.lead.HANDSHAKE_SECONDS", 1000.0)
    for _ in range(MAX_WAITING + 10):
        await port.connect()
    first = await port.joined(1)
    for _ in range(MAX_WAITING + 10):
        await port.connect()
    await port.joined(2)
    await until(lambda: port.agent.refused >= MAX_WAITING + 20 - 1)
    first.send(Message(kind=Kind.ENDED, generation=0, failure=KILLED))
    await until(lambda: 1 in port.leader._ended)


async def test_an_agent_of_another_generation_takes_no_part_and_learns_where_none_does(port: Port) -> None:
    member = await port.member()
    member.send(Message(kind=Kind.JOINS, generation=1))
    assert await is_closed(member._reader)
    port.agent.leave("no more")
    late = await port.member()
    late.send(Message(kind=Kind.JOINS, generation=4))
    heard = await late.receive()
    assert (heard.kind, heard.generation, heard.why) == (Kind.LEAVES, 4, "no more")
    assert await is_closed(late._reader)
    assert port.agent._channels == {}


async def test_one_connection_of_a_worker_counts_which_is_the_newest(port: Port) -> None:
    first = await port.joined()
    second = await port.member()
    second.send(Message(kind=Kind.JOINS, generation=0))
    with pytest.raises((Refused, ConnectionError)):
        await asyncio.wait_for(first.receive(), GENEROUS)
    assert port.leader._present == {0, 1}, "the end of the first one is not the end of the second one"
    second.send(Message(kind=Kind.FAILED, generation=0))
    await until(lambda: port.leader._failed_at is not None)


async def test_a_message_that_was_changed_repeated_or_sent_elsewhere_ends_the_connection(port: Port) -> None:
    for attack in ("changed", "repeated", "elsewhere", "reflected", "left out"):
        member, lines = await port.member(), []
        write = member._writer.write
        member._writer.write = lines.append  # type: ignore[assignment]
        member.send(Message(kind=Kind.JOINS, generation=0))
        member.send(Message(kind=Kind.ENDED, generation=0, failure=KILLED))
        joins, ended = lines
        write(joins)
        await until(lambda: 1 in port.agent._channels)
        other = await port.joined(2)
        sent = {
            "changed": ended.replace(b'"signal":9', b'"signal":8'),
            "repeated": joins,
            "elsewhere": b"",
            "reflected": b"",
            "left out": b"",
        }[attack]
        if attack == "elsewhere":
            other._writer.write(ended)
            reader = other._reader
        elif attack == "reflected":
            for _ in range(2):
                port.agent._channels[1].send(Message(kind=Kind.STOP, generation=0))
            await member._reader.readuntil(b"\n")
            # The number of this line is that of the member's next one.
            write(await member._reader.readuntil(b"\n"))
            reader = member._reader
        elif attack == "left out":
            lines.clear()
            member.send(Message(kind=Kind.FAILED, generation=0))
            write(lines[0])
            reader = member._reader
        else:
            write(sent)
            reader = member._reader
        assert await is_closed(reader), attack
        assert not port.leader._ended, attack
        assert port.leader._failed_at is None, attack


async def test_an_agent_that_sends_too_much_loses_its_connection(port: Port) -> None:
    member = await port.joined(1)
    member._writer.write(b"x" * (3 * MAX_LINE_BYTES // 2))
    assert await is_closed(member._reader)
    often = await port.joined(2)
    for _ in range(200):
        often.send(Message(kind=Kind.ALIVE, generation=0))
    assert await is_closed(often._reader)
    await until(lambda: port.leader._present == {0})
    await port.joined(1)


async def test_an_agent_that_falls_silent_is_lost(port: Port, brief: None) -> None:
    member = await port.joined()
    assert await is_closed(member._reader)
    assert port.leader._present == {0}


async def test_signs_of_life_keep_a_connection(port: Port, brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "ALIVE_SECONDS", 0.05)
    heard = []
    follower = FollowingAgent(lambda: heard.append(1), port.log.append, KEY, 1, WORKERS, *port.address)
    await until(lambda: 1 in port.leader._present)
    seen = port.agent._channels[1]
    await until(lambda: seen._received > 10)
    assert port.agent._channels[1] is seen
    follower.close()
    await until(lambda: port.leader._present == {0})


async def test_the_time_of_a_restart_is_that_of_the_first_failure_in_any_pod(port: Port) -> None:
    for number, ago, time in ((1, 90.0, "2026-01-01T11:58:30Z"), (2, 30.0, "2026-01-01T11:59:30Z")):
        members = [await port.member(worker) for worker in (1, 2)]
        for member in members:
            member.send(Message(kind=Kind.JOINS, generation=number - 1))
        await until(lambda: port.leader._present == {0, 1, 2})
        members[1].send(Message(kind=Kind.FAILED, generation=number - 1, ago=ago))
        await until(lambda: port.leader._failed_at is not None)
        port.agent.ended(KILLED, 600.0)
        for member in members:
            member.send(Message(kind=Kind.ENDED, generation=number - 1, failure=KILLED, ago=1.0))
        await until(lambda: len(port.leader._ended) == WORKERS)
        assert port.agent.restarts is not None
        assert (port.agent.restarts.count, port.agent.restarts.time) == (number, time)
        port.leader.tick(1e9)
        for member in members:
            member.close()
        await until(lambda: port.leader._present == {0})


async def test_an_agent_connects_again_and_takes_part(port: Port) -> None:
    follower = FollowingAgent(lambda: None, port.log.append, KEY, 1, WORKERS, *port.address)
    await until(lambda: 1 in port.leader._present)
    former = port.agent._channels[1]
    former.close()
    await until(lambda: port.agent._channels.get(1) not in (None, former))
    assert follower.left is None
    follower.close()


async def test_each_address_of_worker_0_is_tried(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    async def both(host: str, number: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    monkeypatch.setattr("disttrain_agent.gang.follow.addresses", both)
    follower = FollowingAgent(lambda: None, port.log.append, KEY, 1, WORKERS, "worker-0", port.address[1])
    await until(lambda: 1 in port.leader._present)
    follower.close()


async def test_who_takes_the_place_of_worker_0s_agent_learns_no_message_and_orders_nothing() -> None:
    seen = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readexactly(HELLO_BYTES))
        writer.write(b"n" * 32 + b"c" * 32)
        writer.write(b"0" * 64 + b'{"kind":"stop","generation":0}\n')
        seen.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    host, number = server.sockets[0].getsockname()
    log: list[str] = []
    follower = FollowingAgent(lambda: None, log.append, KEY, 1, WORKERS, host, number)
    await until(lambda: len(seen) > 1)
    assert seen[1] == b""
    assert not follower.must_stop
    await until(lambda: log)
    assert "does not know the token of this attempt" in log[0]
    follower.ended(KILLED, 0.0)
    assert follower.left is not None
    follower.close()
    server.close()
