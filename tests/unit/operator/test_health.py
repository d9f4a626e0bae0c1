"""The port of health and metrics: who asks is answered, whatever strangers hold open there."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from disttrain_operator.connection_limits import Limits
from disttrain_operator.health import Health
from disttrain_operator.lag import LoopLag
from disttrain_operator.metrics import Metrics
from disttrain_operator.settings import Settings
from tests.unit.operator.conftest import eventually

HALF = b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 900
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: operator\r\n\r\n"
LIMITS = Limits(connections=40, seconds=3600)
"""Few enough for a test; what is closed is closed for another reason than time."""


@asynccontextmanager
async def served(limits: Limits = LIMITS, address: str = "127.0.0.1") -> AsyncIterator[Health]:
    lag = LoopLag()
    measuring = asyncio.create_task(lag.run())
    health = Health((), lag, Metrics(), lambda: "acts", limits=limits)
    await health.serve(address, 0)
    try:
        yield health
    finally:
        await health.close()
        measuring.cancel()


class Strangers:
    """Connections that never end their requests."""

    def __init__(self, health: Health) -> None:
        assert health.address is not None
        self._address = health.address
        self.sockets: list[socket.socket] = []

    async def come(self, count: int, sent: bytes = HALF) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(count):
            connection = socket.socket()
            connection.setblocking(False)
            self.sockets.append(connection)
            await loop.sock_connect(connection, self._address)
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(connection, sent)

    def closed(self, connection: socket.socket) -> bool:
        """Whether the other side has ended it."""
        try:
            return connection.recv(65536) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def held(self) -> int:
        """How many are still open."""
        self.sockets = [connection for connection in self.sockets if not self.closed(connection)]
        return len(self.sockets)

    def go(self) -> None:
        for connection in self.sockets:
            connection.close()


@pytest.fixture
async def health() -> AsyncIterator[Health]:
    async with served() as health:
        yield health


@pytest.fixture
async def strangers(health: Health) -> AsyncIterator[Strangers]:
    made = Strangers(health)
    yield made
    made.go()


async def ask(health: Health, path: str = "/healthz", method: str = "GET") -> tuple[int, str]:
    assert health.address is not None
    host, port = health.address
    async with aiohttp.ClientSession() as session, session.request(method, f"http://{host}:{port}{path}") as response:
        return response.status, await response.text()


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def open_places(health: Health) -> int:
    assert health.limiter is not None
    return len(health.limiter)


async def test_the_pages(health: Health) -> None:
    code, text = await ask(health)
    assert code == 200
    assert "event loop" in text
    assert text.endswith("acts\n")
    assert (await ask(health, "/readyz"))[0] == 200
    code, text = await ask(health, "/metrics")
    assert code == 200
    assert "disttrain_jobs" in text
    assert (await ask(health, "/healthz", "HEAD")) == (200, "")
    assert await ask(health, "/nothing") == (404, "no such page; there are /healthz, /readyz, /metrics\n")
    assert await ask(health, "/healthz", "POST") == (405, "only GET is answered\n")
    await eventually(lambda: open_places(health) == 0)


async def answer_at(family: socket.AddressFamily, host: str, port: int) -> bytes:
    """The first line of the answer to a probe that comes over this family."""
    reader, writer = await asyncio.open_connection(host, port, family=family)
    writer.write(WHOLE)
    line = await reader.readline()
    writer.close()
    return line


async def test_by_default_probes_of_both_families_are_answered_at_one_port() -> None:
    async with served(address=Settings().health_address) as health:
        assert health.address is not None
        _, port = health.address
        assert await answer_at(socket.AF_INET, "127.0.0.1", port) == b"HTTP/1.1 200 OK\r\n"
        if has_ipv6():
            assert await answer_at(socket.AF_INET6, "::1", port) == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("error", [OSError(errno.EAFNOSUPPORT, "no such family"), OSError(errno.EADDRNOTAVAIL, "off")])
async def test_where_ipv6_is_off_those_of_ipv4_are(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server

    def without_ipv6(*arguments: Any, family: int = socket.AF_INET, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise error
        return create(*arguments, family=family, **options)

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    async with served(address="") as health:
        assert await answer_at(socket.AF_INET, "127.0.0.1", health.address[1]) == b"HTTP/1.1 200 OK\r\n"


async def test_a_port_that_is_taken_is_an_error_and_not_answered_over_one_family_alone() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.socket(socket.AF_INET6) as taken:
        taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind(("::", 0))
        taken.listen()
        health = Health((), LoopLag())
        with pytest.raises(OSError, match="in use"):
            await health.serve("", taken.getsockname()[1])


async def test_an_address_that_is_named_is_the_only_one() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    async with served(address="::1") as health:
        assert await answer_at(socket.AF_INET6, "::1", health.address[1]) == b"HTTP/1.1 200 OK\r\n"
        with pytest.raises(ConnectionRefusedError):
            await answer_at(socket.AF_INET, "127.0.0.1", health.address[1])


async def test_hundreds_of_half_requests_hold_a_bounded_number_of_places_and_keep_no_probe_out(health, strangers):
    """Red without the bound on places, and where one who comes late is turned away."""
    await strangers.come(400)
    await eventually(lambda: strangers.held() == LIMITS.connections)
    assert open_places(health) == LIMITS.connections
    for _ in range(20):
        assert (await ask(health))[0] == 200
        await strangers.come(5)
    await eventually(lambda: strangers.held() <= LIMITS.connections)
    assert open_places(health) <= LIMITS.connections


async def test_probes_are_answered_while_strangers_keep_coming(health: Health, strangers: Strangers) -> None:
    async def flood() -> None:
        while True:
            await strangers.come(10)
            strangers.held()

    flooding = asyncio.create_task(flood())
    await eventually(lambda: open_places(health) == LIMITS.connections)
    for path in ("/healthz", "/readyz", "/metrics") * 10:
        assert (await ask(health, path))[0] == 200
    assert not flooding.done()
    flooding.cancel()
    await asyncio.gather(flooding, return_exceptions=True)


async def test_the_oldest_that_has_asked_for_nothing_goes_first(health: Health, strangers: Strangers) -> None:
    await strangers.come(LIMITS.connections)
    await eventually(lambda: open_places(health) == LIMITS.connections)
    first, second = strangers.sockets[:2]
    await strangers.come(1)
    await eventually(lambda: strangers.closed(first))
    assert not strangers.closed(second)


async def test_a_request_of_too_many_bytes_is_closed(health: Health, strangers: Strangers) -> None:
    """Red without the bound on bytes."""
    await strangers.come(1, b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 10)
    await eventually(lambda: open_places(health) == 1)
    (connection,) = strangers.sockets
    # No line and no number of lines that the parser refuses by itself.
    with contextlib.suppress(ConnectionError):
        await asyncio.get_running_loop().sock_sendall(connection, (b"X: " + b"y" * 4000 + b"\r\n") * 5)
    await eventually(lambda: strangers.closed(connection))
    assert open_places(health) == 0


async def test_a_place_is_taken_from_who_has_held_it_longest(health: Health, strangers: Strangers) -> None:
    """Red where the newest gives way: a probe that has only just come would be cut off."""
    await strangers.come(LIMITS.connections)
    await eventually(lambda: open_places(health) == LIMITS.connections)
    reader, writer = await asyncio.open_connection(*health.address)
    await strangers.come(5)
    await eventually(lambda: strangers.held() <= LIMITS.connections)
    writer.write(WHOLE)
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    writer.close()


@pytest.mark.parametrize("sent", [b"", HALF, WHOLE[:-1]], ids=["nothing", "half", "all but one byte"])
async def test_a_request_that_takes_too_long_is_closed(sent: bytes) -> None:
    """Red without the bound on time."""
    async with served(Limits(seconds=0.2)) as health:
        strangers = Strangers(health)
        await strangers.come(1, sent)
        await eventually(lambda: strangers.held() == 0)
        assert open_places(health) == 0
        assert (await ask(health))[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 100 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /healthz HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n",
    ],
)
async def test_garbage_or_a_body_is_answered_and_the_connection_closed(health, strangers, sent, caplog):
    await strangers.come(3, sent)
    await eventually(lambda: strangers.held() == 0)
    await eventually(lambda: open_places(health) == 0)
    assert caplog.records == []


async def test_a_page_that_fails_is_reported_in_the_log(health, monkeypatch, caplog):
    def breaks() -> str:
        raise ValueError("nobody thought of this")

    monkeypatch.setattr(health, "_role", breaks)
    assert await ask(health) == (500, "the operator's log says why there is no answer\n")
    assert "/healthz could not be answered" in caplog.text


def test_the_limits_hold_what_a_probe_needs_and_no_more() -> None:
    limits = Limits()
    assert limits.connections * limits.bytes <= 4 * 2**20
    assert limits.seconds <= 10
