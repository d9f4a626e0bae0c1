"""A reverse proxy in front of the API server that answers some requests itself, and spoils watches on demand.

Clients speak plain HTTP to it; towards the API server it has the administrator's certificate. What it is told to do it
does to the client whose requests pass through; a test's own requests go to the API server directly.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from tests.integration.background import InBackground
from tests.waiting import GENEROUS
from tools.cluster.control_plane import ControlPlane

_HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "content-length", "content-encoding", "host"})


@dataclass(frozen=True)
class Request:
    """What a fault may look at."""

    method: str
    path: str
    watch: bool


@dataclass
class Fault:
    """An answer in the API server's place, for the next `times` requests that it concerns."""

    concerns: Callable[[Request], bool]
    times: int
    code: int
    headers: dict[str, str] = field(default_factory=dict)
    reason: str = "Fault"
    body: bytes | None = None
    delay: float = 0.0
    pass_on: bool = False
    """The API server gets the request all the same: its answer is lost."""

    def answer(self) -> bytes:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": self.code}
        return self.body or orjson.dumps(status | {"reason": self.reason, "message": f"a fault: HTTP {self.code}"})


def requests(request: Request) -> bool:
    """All but watches."""
    return not request.watch


def writes(request: Request) -> bool:
    return request.method in ("POST", "PUT", "DELETE")


def watches(request: Request) -> bool:
    return request.watch


@dataclass(eq=False)
class Stream:
    """A watch that passes through."""

    path: str
    request: web.Request
    response: web.StreamResponse
    silent: bool = False


class HttpFaults(InBackground):
    """The proxy. Faults are taken in the order in which they were added."""

    def __init__(self, control_plane: ControlPlane) -> None:
        super().__init__()
        self._server = control_plane.url
        certificate = control_plane.certificate("http-faults", "disttrain-admin", "system:masters")
        self._tls = ssl.create_default_context(cafile=str(control_plane.root_certificate))
        self._tls.load_cert_chain(str(certificate.certificate), str(certificate.key))
        self._session: aiohttp.ClientSession
        self._faults: list[Fault] = []
        self._streams: set[Stream] = set()
        self.opened: list[str] = []
        """Paths of all watches that the API server has begun to answer."""
        self.url = ""

    async def main(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=GENEROUS)
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        application = web.Application(client_max_size=0)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*runner.addresses[0][:2])
        self.begun()
        try:
            await asyncio.Event().wait()
        finally:
            for stream in self._streams:
                _abort(stream.request)
            await runner.cleanup()
            await self._session.close()

    # What a test asks for.

    def add(self, fault: Fault) -> Fault:
        """From now on, until it has been met `times` times."""
        self._faults.append(fault)
        return fault

    def met(self, fault: Fault) -> bool:
        """Whether the fault has been met as often as it was meant to be."""
        return fault.times <= 0

    def streams(self) -> list[str]:
        """Paths of the watches that pass through and say what they hear."""
        return sorted(stream.path for stream in list(self._streams) if not stream.silent)

    def say(self, line: bytes) -> None:
        """Write something into all watches."""
        self.call(self._say(line))

    def end_watches(self, last_words: bytes = b"") -> None:
        """Every watch says something and ends."""
        self.call(self._end(last_words))

    def silence_watches(self) -> None:
        """Every watch stays open and says nothing any more."""
        for stream in list(self._streams):
            stream.silent = True

    # Inside the loop.

    async def _say(self, line: bytes) -> None:
        for stream in list(self._streams):
            with suppress(OSError):
                await stream.response.write(line)

    async def _end(self, last_words: bytes) -> None:
        if last_words:
            await self._say(last_words)
        for stream in list(self._streams):
            stream.silent = True
            if stream.request.transport is not None:
                stream.request.transport.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        about = Request(request.method, request.path, "watch" in request.query)
        fault = self._fault_of(about)
        body = await request.read()
        if fault is not None:
            if fault.pass_on:
                async with self._ask(request, body) as lost:
                    await lost.read()
            await asyncio.sleep(fault.delay)
            return web.Response(
                status=fault.code, body=fault.answer(), headers=fault.headers, content_type="application/json"
            )
        try:
            async with self._ask(request, body) as answer:
                return await self._pass_on(request, answer, about)
        except (aiohttp.ClientError, OSError):
            # Nobody answers behind us: nobody answers here.
            _abort(request)
            return web.Response(status=502)

    def _fault_of(self, about: Request) -> Fault | None:
        for fault in self._faults:
            if fault.times > 0 and fault.concerns(about):
                fault.times -= 1
                return fault
        return None

    def _ask(self, request: web.Request, body: bytes) -> Any:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        return self._session.request(
            request.method, self._server + request.raw_path, data=body or None, headers=headers
        )

    async def _pass_on(
        self, request: web.Request, answer: aiohttp.ClientResponse, about: Request
    ) -> web.StreamResponse:
        if not about.watch or answer.status != 200:
            return web.Response(
                status=answer.status, body=await answer.read(), content_type=answer.content_type or None
            )
        response = web.StreamResponse(status=200, headers={"Content-Type": "application/json"})
        await response.prepare(request)
        stream = Stream(about.path, request, response)
        self._streams.add(stream)
        self.opened.append(about.path)
        try:
            async for chunk in answer.content.iter_any():
                if not stream.silent:
                    await response.write(chunk)
        finally:
            self._streams.discard(stream)
        return response


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
