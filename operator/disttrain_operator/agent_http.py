"""One request to an agent over a connection of its own: HTTP/1.1 with what agents answer, and nothing else of it.

An operator asks a thousand agents a second, each at another address. A client for all of HTTP takes three times as long
for a request. What answers is hostile: of an answer this reads a head of `MAX_HEAD_BYTES` and a body of the length that
the head says, which is no more than it was asked to read.
"""

import asyncio
import errno
import re
from collections.abc import Mapping

from disttrain_operator.kube.errors import TooLarge

MAX_HEAD_BYTES = 16 * 1024
_REFUSALS = (b"401", b"404", b"409")
"""It takes another token, has no such path, or cannot do this. Through the API server's proxy (agent_client.py) a 401
may be the API server's own, and is no refusal."""
_END_OF_HEAD = b"\r\n\r\n"
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})[ \r]")
_LENGTH = re.compile(rb"\r\ncontent-length:([^\r\n]*)", re.IGNORECASE)
_NUMBER = re.compile(rb"[ \t]*[0-9]{1,15}[ \t]*")
_ENCODING = re.compile(rb"\r\n(?:transfer|content)-encoding:", re.IGNORECASE)


class NoAnswer(Exception):  # noqa: N818 - what came of the request
    """Something else than the answer of an agent, or none."""


class Refused(NoAnswer):
    """It says that it does not serve this request, and would say so again."""


class Unreachable(Exception):  # noqa: N818 - what the agent is
    """Nothing answers at the address of a pod that runs, not even the kernel: a program that has ended, is stopped or
    slow lets its kernel refuse or take a connection."""


_NOBODY_THERE = frozenset({errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ETIMEDOUT})


class _Exchange(asyncio.Protocol):
    """Sends a request and takes in the answer, whose body comes to `answer`."""

    def __init__(self, request: bytes, most: int) -> None:
        self._request, self._most = request, most
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._begin = 0
        """Where the body begins; 0: the head is not complete yet."""
        self._length = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.answer.done():
            return
        self._received += data
        try:
            self._take()
        except (NoAnswer, TooLarge) as error:
            self.answer.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(error or NoAnswer("it closes the connection before its answer is complete"))

    def close(self) -> None:
        """End the connection at once, with what is still on its way."""
        self.answer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _take(self) -> None:
        """Look at what has come so far."""
        if not self._begin:
            end = self._received.find(_END_OF_HEAD, 0, MAX_HEAD_BYTES)
            if end < 0:
                if len(self._received) >= MAX_HEAD_BYTES:
                    raise NoAnswer(f"the head of its answer has more than {MAX_HEAD_BYTES} bytes")
                return
            self._begin = end + len(_END_OF_HEAD)
            self._length = _length_of(bytes(self._received[: self._begin]))
            if self._length > self._most:
                raise TooLarge(f"the answer is larger than {self._most} bytes")
        if len(self._received) - self._begin >= self._length:
            self.answer.set_result(bytes(self._received[self._begin : self._begin + self._length]))


def _length_of(head: bytes) -> int:
    """Return how long the body is, by a head that says that the request is served."""
    status, lengths = _STATUS_LINE.match(head), _LENGTH.findall(head)
    if status is None:
        raise NoAnswer(f"it does not answer with HTTP/1.1, but with {head[:32]!r}")
    if status[1] != b"200":
        raise (Refused if status[1] in _REFUSALS else NoAnswer)(f"it answers {status[1].decode()}")
    if len(lengths) != 1 or not _NUMBER.fullmatch(lengths[0]) or _ENCODING.search(head):
        raise NoAnswer("its answer has an encoding, or not one length")
    return int(lengths[0])


async def exchange(
    method: str,
    host: str,
    port: int,
    path: str,
    headers: Mapping[str, str],
    *,
    most: int,
    seconds: float,
    connect_seconds: float,
) -> bytes:
    """Return the body of the answer of `host`, an address, within so many seconds.

    Raises Unreachable, NoAnswer, TooLarge, OSError or TimeoutError; nothing stays open then, either.
    """
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}", "Connection: close", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if method == "POST":
        lines.append("Content-Length: 0")
    one = _Exchange("\r\n".join((*lines, "", "")).encode("ascii"), most)
    try:
        async with asyncio.timeout(seconds):
            await _connect(one, host.strip("[]"), port, connect_seconds)
            return await one.answer
    finally:
        one.close()


async def _connect(one: _Exchange, address: str, port: int, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().create_connection(lambda: one, address, port)
    except TimeoutError as error:
        raise Unreachable("no connection in time") from error
    except OSError as error:
        if error.errno in _NOBODY_THERE:
            raise Unreachable(error.strerror) from error
        raise
