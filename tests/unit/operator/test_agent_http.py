"""One request to an agent: what is sent, what is taken of the answer of whatever listens there, and what stays open."""

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from disttrain_api.names import CHECKPOINT_PATH
from disttrain_api.report import MAX_AGENT_ANSWER_BYTES
from disttrain_operator.agent_client import STACKS_PATH, STATUS_PATH, Agent, ask_directly
from disttrain_operator.agent_http import MAX_HEAD_BYTES, NoAnswer, Refused, Unreachable, exchange
from disttrain_operator.kube.errors import TooLarge
from tests.builders import UID

OK = b"HTTP/1.1 200 OK\r\n"
GENEROUS = 60.0
Sends = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """Listens, and sends what a test wants when a request has come; remembers the requests."""

    def __init__(self, sends: Sends) -> None:
        self._sends = sends
        self.requests: list[bytes] = []
        self.asked = asyncio.Event()
        self.ended = asyncio.Event()
        """The other side has ended the connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(await reader.readuntil(b"\r\n\r\n"))
        self.asked.set()
        try:
            await self._sends(writer)
            await reader.read()
        except ConnectionError:
            pass
        self.ended.set()
        writer.close()


@asynccontextmanager
async def listening(sends: Sends) -> AsyncIterator[tuple[Peer, int]]:
    peer = Peer(sends)
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    async with server:
        yield peer, server.sockets[0].getsockname()[1]


def parts(*texts: bytes) -> Sends:
    """Send these, each on its own."""

    async def send(writer: asyncio.StreamWriter) -> None:
        for text in texts:
            writer.write(text)
            await writer.drain()
            await asyncio.sleep(0)

    return send


def whole(body: bytes, head: bytes = b"") -> bytes:
    return OK + head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def endless(begin: bytes, more: bytes) -> Sends:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        while not writer.is_closing():
            writer.write(more)
            await writer.drain()

    return send


async def ask(port: int, most: int = 100, seconds: float = GENEROUS) -> bytes:
    limits: dict[str, Any] = {"most": most, "seconds": seconds, "connect_seconds": GENEROUS}
    return await exchange("GET", "127.0.0.1", port, "/a", {"X": "y"}, **limits)


ANSWER = whole(b'{"a": 1}', b"Content-Type: application/json\r\n")


@pytest.mark.parametrize(
    "sends",
    [
        parts(ANSWER),
        parts(*(ANSWER[at : at + 1] for at in range(len(ANSWER)))),
        parts(ANSWER + b"HTTP/1.1 500 no\r\n\r\n"),
        parts(OK.replace(b"1.1", b"1.0") + b"CONTENT-LENGTH:8 \r\n\r\n", b'{"a": 1}'),
    ],
    ids=["at once", "byte by byte", "more than it says", "another way to write it"],
)
async def test_a_body_of_the_length_that_the_head_says_is_taken_and_the_connection_ends(sends: Sends) -> None:
    """Red where the connection is left to the other side, which does not end it."""
    async with listening(sends) as (peer, port):
        assert await ask(port) == b'{"a": 1}'
        await asyncio.wait_for(peer.ended.wait(), GENEROUS)
    assert peer.requests == [
        b"GET /a HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\nAccept-Encoding: identity\r\nX: y\r\n\r\n"
        % port
    ]


async def test_an_answer_may_be_empty() -> None:
    async with listening(parts(whole(b""))) as (_, port):
        assert await ask(port) == b""


@pytest.mark.parametrize(
    ("sends", "error", "says"),
    [
        (parts(b"HTTP/1.1 302 Found\r\nLocation: /a\r\nContent-Length: 0\r\n\r\n"), NoAnswer, "it answers 302"),
        (parts(b"HTTP/1.1 401\r\nContent-Length: 0\r\n\r\n"), Refused, "it answers 401"),
        (parts(b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER), NoAnswer, "it answers 100"),
        (parts(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), NoAnswer, "not answer with HTTP/1.1, but with b'SSH-2.0-OpenSSH"),
        (parts(b"HTTP/2 200\r\nContent-Length: 0\r\n\r\n"), NoAnswer, "does not answer with HTTP/1.1"),
        (parts(b"HTTP/1.1 2000\r\nContent-Length: 0\r\n\r\n"), NoAnswer, "does not answer with HTTP/1.1"),
        (parts(OK + b"\r\n{}"), NoAnswer, "not one length"),
        (parts(OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"), NoAnswer, "not one length"),
        (parts(OK + b"Content-Length: 2\r\nContent-Length: x\r\n\r\n{}"), NoAnswer, "not one length"),
        (parts(OK + b"Content-Length: -2\r\n\r\n{}"), NoAnswer, "not one length"),
        (parts(OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}"), NoAnswer, "not one length"),
        (parts(whole(b"2\r\n{}\r\n0\r\n\r\n", b"Transfer-Encoding: chunked\r\n")), NoAnswer, "an encoding"),
        (parts(whole(b"{}", b"content-encoding: gzip\r\n")), NoAnswer, "an encoding"),
        (parts(OK + b"Content-Length: 101\r\n\r\n"), TooLarge, "larger than 100 bytes"),
        (endless(OK, b"X: y\r\n"), NoAnswer, f"more than {MAX_HEAD_BYTES} bytes"),
        (endless(b"", b"x" * 65536), NoAnswer, f"more than {MAX_HEAD_BYTES} bytes"),
    ],
    ids=[
        "a redirect",
        "a refusal",
        "to go on",
        "another protocol",
        "another version",
        "a long code",
        "no length",
        "two lengths",
        "a length that is none beside one",
        "less than nothing",
        "a long length",
        "chunks",
        "compressed",
        "too large",
        "endless headers",
        "endless bytes",
    ],
)
async def test_what_is_no_answer_of_an_agent_is_refused_and_the_connection_ends(
    sends: Sends, error: type[Exception], says: str
) -> None:
    """Red without any one of the looks at a head, and where a refused connection stays open."""
    async with listening(sends) as (peer, port):
        with pytest.raises(error, match=says) as raised:
            await ask(port)
        assert raised.type is error
        await asyncio.wait_for(peer.ended.wait(), GENEROUS)


@pytest.mark.parametrize("begin", [b"", OK, ANSWER[:-1]], ids=["nothing", "half a head", "half a body"])
async def test_an_answer_that_is_not_complete_is_none(begin: bytes) -> None:
    """Whether the other side ends the connection or keeps it: red without the limit of time."""

    async def sends(writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        writer.close()

    async with listening(sends) as (_, port):
        with pytest.raises(NoAnswer, match="before its answer is complete"):
            await ask(port)
    async with listening(parts(begin)) as (_, port):
        with pytest.raises(TimeoutError):
            await ask(port, seconds=0.05)


async def test_a_request_that_is_given_up_leaves_no_connection() -> None:
    async with listening(parts(OK)) as (peer, port):
        asking = asyncio.create_task(ask(port))
        await asyncio.wait_for(peer.asked.wait(), GENEROUS)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(peer.ended.wait(), GENEROUS)


async def test_each_path_of_an_agent_has_its_method_its_token_and_its_bound() -> None:
    """A checkpoint is asked for by POST; stacks are smaller than a status, and a caller may want less than either."""
    body = b"x" * 5000
    async with listening(parts(whole(body))) as (peer, port):
        agent = Agent(UID, "pod", 1, "127.0.0.1", port)
        for path in (STATUS_PATH, STACKS_PATH):
            assert await ask_directly(agent, "secret", path) == body
        for most, path in ((MAX_AGENT_ANSWER_BYTES, CHECKPOINT_PATH), (4999, STATUS_PATH), (4999, STACKS_PATH)):
            with pytest.raises(TooLarge, match="larger than"):
                await ask_directly(Agent(UID, "pod", 1, "127.0.0.1", port, most_bytes=most), "secret", path)
    lines = [request.decode().split("\r\n") for request in peer.requests]
    assert [words[0] for words in lines] == [
        f"GET {STATUS_PATH} HTTP/1.1",
        f"GET {STACKS_PATH} HTTP/1.1",
        f"POST {CHECKPOINT_PATH} HTTP/1.1",
        f"GET {STATUS_PATH} HTTP/1.1",
        f"GET {STACKS_PATH} HTTP/1.1",
    ]
    assert all("X-Disttrain-Token: secret" in words for words in lines)
    assert ["Content-Length: 0" in words for words in lines] == [False, False, True, False, False]


async def test_an_address_of_version_6_is_connected_without_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    async def connects(factory: Any, host: str, port: int) -> None:
        found.append((host, port))
        factory().answer.set_result(b"")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connects)
    await ask_directly(Agent(UID, "pod", 1, "[fd00::7]", 29700), "t", STATUS_PATH)
    assert found == [("fd00::7", 29700)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError(), Unreachable),
        (OSError(errno.ETIMEDOUT, "why"), Unreachable),
        (OSError(errno.EHOSTUNREACH, "why"), Unreachable),
        (OSError(errno.ENETUNREACH, "why"), Unreachable),
        (OSError(errno.ECONNREFUSED, "why"), ConnectionRefusedError),
        (OSError(errno.EMFILE, "why"), OSError),
    ],
    ids=repr,
)
async def test_only_where_not_even_the_kernel_answers_an_agent_is_unreachable(
    error: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connects(*_: object) -> None:
        raise error

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connects)
    with pytest.raises(expected):
        await ask_directly(Agent(UID, "pod", 1, "10.0.0.7", 29700), "t", STATUS_PATH)


@pytest.mark.parametrize("error", [TimeoutError(errno.ETIMEDOUT, "why"), OSError(errno.EHOSTUNREACH, "why")])
async def test_a_connection_that_breaks_later_is_no_agent_that_cannot_be_reached(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connects(factory: Any, *_: object) -> None:
        factory().connection_lost(error)

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connects)
    with pytest.raises(type(error), match="why"):
        await ask_directly(Agent(UID, "pod", 1, "10.0.0.7", 29700), "t", STATUS_PATH)
