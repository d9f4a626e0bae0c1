"""A TCP proxy that can be made to misbehave; what flows through it is not looked at."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.integration.background import InBackground

CHUNK = 65536


@dataclass(eq=False)
class Connection:
    """A client's connection and ours to the server."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear: bytes stop, sockets stay."""
    forwarding: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear: nothing is read from the client any more; what it sends piles up in the sockets' buffers."""
    cut_after: int | None = None
    """Reset after so many more bytes for the client."""

    def __post_init__(self) -> None:
        self.open.set()
        self.forwarding.set()


class TcpProxy(InBackground):
    """Passes bytes between its clients and a server."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._target = host, port
        self.port = 0
        self.latency = 0.0
        """Seconds before each piece of data is passed on, either way."""
        self.accepting = True
        """False: new connections are reset at once."""
        self._connections: set[Connection] = set()

    async def main(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.begun()
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            for connection in self._connections:
                _reset(connection.client)
                _reset(connection.server)

    # What a test asks for. New connections are sound; each call speaks of those that are there.

    def connections(self) -> int:
        return self.call(self._count())

    def reset(self) -> None:
        """As a machine does that has lost its memory: RST, both ways."""
        self._each(lambda one: (_reset(one.client), _reset(one.server)))

    def half_open(self) -> None:
        """As a lost network does: nothing arrives any more, and nobody is notified."""
        self._each(lambda one: one.open.clear())

    def stop_reading(self) -> None:
        """As a server does that hangs: the client's bytes are taken by nobody, until its buffers are full."""
        self._each(lambda one: one.forwarding.clear())

    def cut_in_mid_line(self, after: int) -> None:
        """Reset once `after` more bytes have gone to the client."""
        self._each(lambda one: setattr(one, "cut_after", after))

    # Inside the loop.

    async def _count(self) -> int:
        return len(self._connections)

    def _each(self, act: object) -> None:
        async def now() -> None:
            for connection in list(self._connections):
                act(connection)  # type: ignore[operator]

        self.call(now())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.accepting:
            _reset(writer)
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        connection = Connection(writer, server_writer)
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._upstream(connection, reader))
                both.create_task(self._downstream(connection, server_reader))
        except* OSError:
            pass
        finally:
            self._connections.discard(connection)
            _reset(writer)
            _reset(server_writer)

    async def _upstream(self, connection: Connection, reader: asyncio.StreamReader) -> None:
        while True:
            await connection.forwarding.wait()
            data = await reader.read(CHUNK)
            await self._pass(connection, connection.server, data)

    async def _downstream(self, connection: Connection, reader: asyncio.StreamReader) -> None:
        while True:
            data = await reader.read(CHUNK)
            if connection.cut_after is not None and len(data) >= connection.cut_after:
                connection.client.write(data[: connection.cut_after])
                with suppress(OSError):
                    await connection.client.drain()
                raise ConnectionResetError("cut")
            if connection.cut_after is not None:
                connection.cut_after -= len(data)
            await self._pass(connection, connection.client, data)

    async def _pass(self, connection: Connection, writer: asyncio.StreamWriter, data: bytes) -> None:
        if not data:
            raise ConnectionResetError("one side has closed")
        await connection.open.wait()
        if self.latency:
            await asyncio.sleep(self.latency)
        writer.write(data)
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """RST instead of FIN."""
    made = writer.get_extra_info("socket")
    if made is not None and made.fileno() >= 0:
        with suppress(OSError):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def kubeconfig_through(original: Path, server: str, folder: Path) -> Path:
    """The kubeconfig with another address."""
    config = yaml.safe_load(original.read_text())
    for entry in config["clusters"]:
        entry["cluster"]["server"] = server
    path = folder / "through-proxy.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path
