"""Requests to the API server: aiohttp and orjson, plain dicts in and out.

Every request of the operator may be repeated: what it creates has a fixed name (a second POST gets 409), what it
writes carries a resourceVersion (a second write gets 409), what it deletes carries a uid. So a lost connection is
simply tried again here, and only an outage longer than a few seconds reaches the caller as Unavailable.

No rate limit of our own: a bounded number of requests is in flight, for which namespaces take turns, and all of them
wait when the server says 429.
Watches are not counted: they last for minutes.

Writes are sent only while `may_write()` is true: of several replicas one acts, and it may cease to in mid-work.

What is made or patched is validated strictly: a field that the API server does not know is refused with its name, and
the refusal reported, where it would be left out in silence otherwise. What is replaced is not: jobs' statuses and the
Lease, which must be written also where the CustomResourceDefinition is older than the operator. What is left out of
these is logged.

Every answer is read up to a bound of bytes. One that is larger, or cannot be decoded, is Undecodable, and not asked for
again: it would be the same. One of much text is decoded in a thread, and there, too, is taken from it what its reader
keeps. Collections are read by kube/lists.py.

A request that times out has met a connection that is dead, or a server that is slow. What comes after it uses new
connections: of the kept ones others may be just as dead, and each would cost another time-out.
"""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import aiohttp
import orjson
from yarl import URL

from disttrain_api.bounds import cut
from disttrain_operator.kube.auth import Access
from disttrain_operator.kube.errors import (
    KubeError,
    StandingBy,
    Throttled,
    TooLarge,
    Unauthorized,
    Unavailable,
    Undecodable,
    error_of,
)
from disttrain_operator.kube.one_at_a_time import in_thread
from disttrain_operator.kube.sizes import LARGE_BYTES, MAX_PARSED_BYTES, parsed_size
from disttrain_operator.kube.slots import Slots, namespace_of

logger = logging.getLogger(__name__)

Raw = dict[str, Any]
Query = Mapping[str, str]
Answer = TypeVar("Answer")

Trim = Callable[[Raw], Raw]

JSON = "application/json"
REQUEST_SECONDS = 30.0
# An object has no more. An API server stores at most 1.5 MiB of it, unless it is set up otherwise.
MAX_BODY_BYTES = 16 * 2**20
# A refusal may repeat what it refuses.
MAX_ERROR_BYTES = 2**20
TOO_MANY_PARTS = f"it has so many parts that it takes more than {MAX_PARSED_BYTES // 2**20} MiB to read"
MERGE_PATCH = "application/merge-patch+json"
_STRICT: Query = {"fieldValidation": "Strict"}
_MAX_WARNINGS = 100
# The first retry is immediate: a kept connection that the server has closed meanwhile is the usual case.
RETRY_DELAYS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
# OSError: also a token file that is not there for a moment.
_LOST = (aiohttp.ClientError, TimeoutError, OSError)


class Client:
    """One API server, one pool of connections. Made and closed inside a running loop."""

    def __init__(
        self,
        access: Access,
        *,
        max_in_flight: int = 64,
        timeout: float = REQUEST_SECONDS,
        retry_delays: tuple[float, ...] = RETRY_DELAYS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.access = access
        self.max_in_flight = max_in_flight
        self.may_write: Callable[[], bool] = lambda: True
        self.on_answer: Callable[[str, int, float], None] = lambda method, code, seconds: None
        """Called with the method, the code (0: no answer) and the seconds of every request but watches."""
        self._slots = Slots(max_in_flight)
        self._retry_delays = retry_delays
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=5)
        self._clock, self._sleep = clock, sleep
        self._not_before = 0.0
        self._session = self._new_session()
        self._users: Counter[aiohttp.ClientSession] = Counter()
        self._warned: set[str] = set()

    def _new_session(self) -> aiohttp.ClientSession:
        self._certificate = self.access.credentials.certificate()
        # An explicit context also keeps aiohttp from building the system's default one, which takes 30 ms.
        connector = aiohttp.TCPConnector(
            limit=0, ssl=self.access.ssl_context() or False, keepalive_timeout=300, socket_factory=_socket
        )
        return aiohttp.ClientSession(connector=connector, auto_decompress=True, proxy=self.access.proxy)

    async def close(self) -> None:
        """Closes all connections, watches too."""
        for session in {self._session, *self._users}:
            await session.close()

    @asynccontextmanager
    async def _connections(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield the kept connections. After a time-out, or for another certificate, they are closed once unused."""
        former = self._session
        if self.access.credentials.certificate() != self._certificate:
            self._session = self._new_session()
        session = self._session
        self._users[session] += 1
        try:
            if former is not session and not self._users[former]:
                await former.close()
            yield session
        except TimeoutError:
            if session is self._session:
                self._session = self._new_session()
            raise
        finally:
            self._users[session] -= 1
            if not self._users[session]:
                del self._users[session]
                if session is not self._session:
                    await session.close()

    async def get(self, path: str, query: Query | None = None, *, trim: Trim | None = None) -> Raw:
        """An object or a list."""
        return await self.request("GET", path, query=query, trim=trim)

    async def create(self, path: str, body: Raw | bytes, *, trim: Trim | None = None) -> Raw:
        """POST an object into a collection. A repeated POST whose first answer was lost raises Conflict."""
        return await self.request("POST", path, query=_STRICT, body=body, trim=trim)

    async def replace(self, path: str, body: Raw | bytes, *, trim: Trim | None = None) -> Raw:
        """PUT. With metadata.resourceVersion in the body a stale writer gets a Conflict."""
        return await self.request("PUT", path, body=body, trim=trim)

    async def patch(self, path: str, body: Raw, *, trim: Trim | None = None) -> Raw:
        """A merge patch. With metadata.uid in the body, Conflict where the name belongs to another by now."""
        return await self.request("PATCH", path, query=_STRICT, body=body, trim=trim)

    async def delete(self, path: str, *, uid: str, grace_seconds: int | None = None, trim: Trim | None = None) -> Raw:
        """Delete the object with this uid; Conflict where the name belongs to another by now."""
        options: Raw = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        return await self.request("DELETE", path, body=options, trim=trim)

    async def read(self, path: str, query: Query, most: int, *, accept: str = JSON) -> bytes:
        """Return the answer to a GET as it stands; raises TooLarge where it has more than `most` bytes."""
        return await self._repeated(lambda: self._once("GET", path, query, None, most, accept))

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Raw | bytes | None = None,
        trim: Trim | None = None,
    ) -> Raw:
        """One request, repeated over lost connections, 5xx and 429. Raises ApiError, Unavailable or Undecodable.

        `trim`: what the caller keeps of the answer. If the answer is much text, the caller gets no more than that.
        """
        data = body if isinstance(body, bytes | None) else orjson.dumps(body)

        async def parsed() -> Raw:
            answer = await self._once(method, path, query, data)
            if len(answer) <= LARGE_BYTES:
                return _parsed(answer, method, path)
            return await in_thread(lambda: _read_large(answer, method, path, trim))

        return await self._repeated(parsed)

    async def _repeated(self, once: Callable[[], Awaitable[Answer]]) -> Answer:
        failures = iter(self._retry_delays)
        while True:
            try:
                return await once()
            except (Unavailable, Throttled, Unauthorized) as error:
                delay = next(failures, None)
                if delay is None:
                    raise
                if not isinstance(error, Throttled):  # a throttled request waits in _once, as all others do
                    await self._sleep(delay)

    async def _once(
        self,
        method: str,
        path: str,
        query: Query | None,
        data: bytes | None,
        most: int = MAX_BODY_BYTES,
        accept: str = JSON,
    ) -> bytes:
        async with self._slots.of(namespace_of(path)):
            await self._wait_if_throttled()
            if method != "GET" and not self.may_write():
                raise StandingBy(f"{method} {path} was not sent: another replica acts")
            began = time.perf_counter()
            code = 0
            try:
                async with (
                    self._connections() as session,
                    session.request(
                        method,
                        self._url(path, query),
                        data=data,
                        headers=self._headers(method, accept),
                        timeout=self._timeout,
                        server_hostname=self.access.server_name,
                    ) as response,
                ):
                    answer = await (_refusal(response) if response.status >= 400 else read_body(response, most))
                    code = response.status
            except TooLarge as error:
                code = response.status
                raise TooLarge(f"{method} {path}: {error}") from None
            except _LOST as error:
                raise Unavailable(f"{method} {path}: {str(error) or type(error).__name__}") from error
            finally:
                self.on_answer(method, code, time.perf_counter() - began)
        if response.status >= 400:
            raise self._taken(error_of(response.status, answer), response)
        for warning in response.headers.getall("Warning", ()):
            self._warn(cut(warning))
        return answer

    def _warn(self, warning: str) -> None:
        """Log once what the API server leaves out of what was written."""
        if "unknown field" in warning and warning not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(warning)
            logger.warning("left out by the API server: %s; is its CustomResourceDefinition of this release?", warning)

    @asynccontextmanager
    async def stream(self, path: str, query: Query, *, silence: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """The chunks of a watch, as they arrive; Unavailable after `silence` seconds without a byte."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=silence)
        try:
            async with (
                self._connections() as session,
                session.get(
                    self._url(path, query),
                    headers=self._headers(),
                    timeout=timeout,
                    server_hostname=self.access.server_name,
                ) as response,
            ):
                if response.status >= 400:
                    raise self._taken(error_of(response.status, await _refusal(response)), response)
                yield response.content.iter_any()
        except _LOST as error:
            raise Unavailable(f"watch of {path}: {str(error) or type(error).__name__}") from error

    def _url(self, path: str, query: Query | None) -> URL:
        url = URL(self.access.server + path, encoded=True)
        return url.with_query(query) if query else url

    def _headers(self, method: str = "GET", accept: str = JSON) -> dict[str, str]:
        content = MERGE_PATCH if method == "PATCH" else JSON
        headers = {"Accept": accept, "Content-Type": content, "User-Agent": "disttrain-operator"}
        token = self.access.credentials.token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _taken(self, refusal: KubeError, response: aiohttp.ClientResponse) -> KubeError:
        """Return the refusal, once what follows from it for the next requests is done."""
        if isinstance(refusal, Throttled):
            self._throttle(response.headers.get("Retry-After"))
        elif isinstance(refusal, Unauthorized):
            self.access.credentials.refused()
        return refusal

    def _throttle(self, retry_after: str | None) -> None:
        seconds = 1.0
        with suppress(TypeError, ValueError):
            seconds = float(retry_after)  # type: ignore[arg-type]
        self._not_before = max(self._not_before, self._clock() + min(max(seconds, 0.1), 30.0))

    async def _wait_if_throttled(self) -> None:
        # Others may get a 429 meanwhile, which moves the time.
        while (delay := self._not_before - self._clock()) > 0:
            await self._sleep(delay)


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body; raises TooLarge where it has more than `most` bytes, and leaves the rest unread."""
    if (response.content_length or 0) > most:
        raise TooLarge(f"the answer is larger than {most} bytes")
    parts, size = list[bytes](), 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most:
            raise TooLarge(f"the answer is larger than {most} bytes")
        parts.append(part)
    return b"".join(parts)


async def _refusal(response: aiohttp.ClientResponse) -> bytes:
    """Return what a refusal says; nothing where it says too much: its code is enough to go on with."""
    try:
        return await read_body(response, MAX_ERROR_BYTES)
    except TooLarge:
        return b""


def _parsed(answer: bytes, method: str, path: str) -> Raw:
    try:
        parsed = orjson.loads(answer)
    except orjson.JSONDecodeError as error:
        if answer[:1] == b"{" and answer.rstrip()[-1:] == b"}":
            raise Undecodable(f"{method} {path}: the answer cannot be decoded: {error.msg}") from error
        raise Unavailable(f"{method} {path}: the answer is not JSON") from error
    if not isinstance(parsed, dict):
        raise Unavailable(f"{method} {path}: the answer is not an object")
    return parsed


def _read_large(answer: bytes, method: str, path: str, trim: Trim | None) -> Raw:
    if parsed_size(answer) > MAX_PARSED_BYTES:
        raise Undecodable(f"{method} {path}: the answer cannot be decoded: {TOO_MANY_PARTS}")
    parsed = _parsed(answer, method, path)
    if trim is not None:
        # Whatever is wrong with it is said by whoever takes it in.
        with suppress(Exception):
            return trim(parsed)
    return parsed


def _socket(address: Any) -> socket.socket:
    """Half-open connections (a server that lost power) are noticed by the kernel within half a minute."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


__all__ = ["Client", "KubeError", "Query", "Raw"]
