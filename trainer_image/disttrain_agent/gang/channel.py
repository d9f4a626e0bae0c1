"""A connection between two agents of a gang: both prove the key of the attempt, then each line has a code of its own.

The code is HMAC-SHA256 under a key of this connection, over the direction, the number of the line, and the line. So
nothing that was sent elsewhere, before, or by somebody else is taken, and nothing can be left out between two lines.
"""

import asyncio
import hmac
import secrets
from contextlib import suppress

from disttrain_agent.gang.messages import MAX_BODY_BYTES, Kind, Message, decode, encode
from disttrain_agent.limits import Bucket
from disttrain_api.handshake import (
    ANSWER_BYTES,
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Refused,
    answer_to,
    check_proof,
    hello_of,
    proof_for,
    read_hello,
)

_CODE_BYTES = 64
"""In hexadecimal digits."""
MAX_LINE_BYTES = _CODE_BYTES + MAX_BODY_BYTES
_MAX_UNSENT_BYTES = 4 * MAX_LINE_BYTES
MESSAGES_PER_SECOND = 20.0
ALIVE_SECONDS = 5.0
SILENT_SECONDS = 20.0
"""After which the other side counts as gone: its node may be dead, or its agent be stopped."""
HANDSHAKE_SECONDS = 10.0


class Channel:
    """Messages in both directions, after the handshake."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: bytes, own: bytes, others: bytes
    ) -> None:
        self._reader, self._writer, self._session = reader, writer, session
        self._own, self._others = own, others
        self._sent = self._received = 0
        self._rate = Bucket(MESSAGES_PER_SECOND, asyncio.get_running_loop().time())

    def send(self, message: Message) -> None:
        """Send a message. A peer that reads nothing loses the connection."""
        body = encode(message)
        code = _code(self._session, self._own, self._sent, body)
        self._sent += 1
        self._writer.write(code + body + b"\n")
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self.close()

    async def receive(self) -> Message:
        """Return the next message that is more than a sign of life. Raises OSError or Refused where none can come."""
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readuntil(b"\n"), SILENT_SECONDS)
            except asyncio.LimitOverrunError as error:
                raise Refused("it sends a line without an end") from error
            except asyncio.IncompleteReadError as error:
                raise Refused("it has closed the connection") from error
            if not self._rate.take(asyncio.get_running_loop().time()):
                raise Refused("it sends too many messages")
            code, body = line[:_CODE_BYTES], line[_CODE_BYTES:-1]
            if not hmac.compare_digest(code, _code(self._session, self._others, self._received, body)):
                raise Refused("a message is not the next one of this connection")
            self._received += 1
            message = decode(body)
            if message is None:
                raise Refused("it speaks another version")
            if message.kind is not Kind.ALIVE:
                return message

    async def stay_alive(self) -> None:
        """Send signs of life until cancelled."""
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            self.send(Message(kind=Kind.ALIVE, generation=0))

    def close(self) -> None:
        """End the connection, with what is not sent yet where the other side reads it."""
        self._writer.close()


async def lead(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, workers: int
) -> tuple[int, Channel]:
    """Return the worker that a new connection comes from, which has proved the key. Raises OSError or Refused."""
    hello = b""
    while len(hello) < HELLO_BYTES:
        data = await reader.read(HELLO_BYTES - len(hello))
        hello += data
        # It raises at the first byte that is none of a hello's.
        claimed = read_hello(hello, workers)
        if not data:
            raise Refused("it left before it proved that it knows the token of this attempt")
    if claimed.rank == 0:
        raise Refused("it is worker 0")
    nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(answer_to(hello, nonce, key))
    check_proof(await _exactly(reader, PROOF_BYTES), hello, nonce, key)
    return claimed.rank, Channel(reader, writer, _session(key, hello, nonce), b"leader", b"member")


async def follow(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, worker: int, workers: int
) -> Channel:
    """Return the channel to the leader, which has proved the key. Raises OSError or Refused."""
    hello = hello_of(worker, workers, secrets.token_bytes(NONCE_BYTES))
    writer.write(hello)
    answer = await _exactly(reader, ANSWER_BYTES)
    writer.write(proof_for(hello, answer, key))
    return Channel(reader, writer, _session(key, hello, answer[:NONCE_BYTES]), b"member", b"leader")


async def end(writer: asyncio.StreamWriter) -> None:
    """End a connection at once."""
    writer.transport.abort()
    # What broke it is known already, and nobody else asks.
    with suppress(OSError):
        await writer.wait_closed()


async def _exactly(reader: asyncio.StreamReader, count: int) -> bytes:
    try:
        return await reader.readexactly(count)
    except asyncio.IncompleteReadError as error:
        raise Refused("it has closed the connection") from error


def _session(key: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, b"session\n" + hello + nonce, "sha256")


def _code(session: bytes, direction: bytes, number: int, body: bytes) -> bytes:
    return hmac.new(session, b"%s %d\n" % (direction, number) + body, "sha256").hexdigest().encode()
