"""The HTTP application: static files, and page data of a source as JSON with an ETag. It answers GET alone.

What was answered is kept for a moment, for the reader who has asked, and for nobody else.

GET /                                  the page
GET /NAME                              its styles and modules
GET /api/jobs?namespaces=A,B           the list; without namespaces that of all
GET /api/job?key=K                     a job
GET /api/log?key=K&rank=R&tail=N       the last lines of a rank's log
GET /api/stacks?key=K&rank=R           where the threads of a rank are
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from disttrain_dashboard.guard import LOOPBACK, add_headers, guard, refusal
from disttrain_dashboard.readers import Reader, Readers
from disttrain_dashboard.source import Source, SourceError, UnknownJobError
from disttrain_dashboard.views.bounded import text
from disttrain_dashboard.views.listing import listing
from disttrain_dashboard.views.page import page
from disttrain_dashboard.views.ranks import MAX_RANKS

logger = logging.getLogger(__name__)

MAX_TAIL = 500
MAX_LINE = 2000
MAX_STACKS = 2**18
"""Letters of a rank's stacks."""
_MAX_KEY = 512
_MAX_KEPT = 256
_MAX_KEPT_BYTES = 64 * 2**20
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def application(source: Source, token: str, hosts: Collection[str] = LOOPBACK) -> web.Application:
    """Return the application for one person. token: what a browser must know. hosts: names and addresses it is called
    by."""
    return _application(_One(source), guard(token, hosts))


def application_of_viewers(viewers: Readers, at_once: int) -> web.Application:
    """Return the application for many people, with a connection for each request. at_once: answers that are made at
    the same time."""
    app = _application(viewers, _closing, at_once=at_once)
    app.router.add_get("/healthz", _healthz)
    return app


def _application(readers: Readers, *middlewares: Middleware, at_once: int = 32) -> web.Application:
    app = web.Application(middlewares=middlewares)
    app.on_response_prepare.append(add_headers)
    pages = _Pages(readers, at_once)
    app.router.add_get("/api/jobs", pages.jobs)
    app.router.add_get("/api/job", pages.job)
    app.router.add_get("/api/log", pages.log)
    app.router.add_get("/api/stacks", pages.stacks)
    app.router.add_get("/{name:[^/]*}", _Static().answer)
    return app


@web.middleware
async def _closing(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPException as refused:
        refused.force_close()
        raise
    response.force_close()
    return response


async def _healthz(_: web.Request) -> web.Response:
    """Answer that this process turns. An API server that is away makes it no worse to start it again."""
    return web.Response(text="ok\n")


class _One:
    """The reader who has shown the only token."""

    asks_for_token = False

    def __init__(self, source: Source) -> None:
        self._reader = Reader(source)

    @asynccontextmanager
    async def reading(self, _: web.Request) -> AsyncIterator[Reader]:
        yield self._reader


class _Kept:
    """An answer and how long it holds. Who asks meanwhile waits for it."""

    def __init__(self) -> None:
        self.lock, self.until, self.body, self.etag = asyncio.Lock(), 0.0, b"", ""


class _Pages:
    def __init__(self, readers: Readers, at_once: int) -> None:
        self._readers, self._turn = readers, asyncio.Semaphore(at_once)
        self._kept: OrderedDict[tuple[int, str], _Kept] = OrderedDict()
        """By reader and page: readers may have different rights."""

    async def jobs(self, request: web.Request) -> web.Response:
        def make(source: Source) -> Any:
            return {**listing(source.jobs(), source.title), "asksForToken": self._readers.asks_for_token}

        return await self._answer(request, "jobs", make)

    async def job(self, request: web.Request) -> web.Response:
        key = _key(request)
        return await self._answer(request, f"job {key}", lambda source: page(source.job(key)))

    async def log(self, request: web.Request) -> web.Response:
        key, rank = _key(request), _number(request, "rank", 0, MAX_RANKS)
        tail = max(_number(request, "tail", 100, MAX_TAIL), 1)

        def make(source: Source) -> Any:
            return {"lines": [text(line, MAX_LINE) for line in source.log(key, rank, tail)[-tail:]]}

        return await self._answer(request, f"log {key} {rank} {tail}", make)

    async def stacks(self, request: web.Request) -> web.Response:
        key, rank = _key(request), _number(request, "rank", 0, MAX_RANKS)

        def make(source: Source) -> Any:
            lines = source.stacks(key, rank)[:MAX_STACKS].splitlines()
            return {"lines": [text(line, MAX_LINE) for line in lines]}

        return await self._answer(request, f"stacks {key} {rank}", make)

    async def _answer(self, request: web.Request, name: str, make: Callable[[Source], Any]) -> web.Response:
        """Answer with what `make` returns, or has returned a moment ago; 304 if the browser has it already."""
        try:
            async with self._readers.reading(request) as reader:
                body, etag = await self._made(reader, name, make)
        except UnknownJobError:
            return refusal(404, "no such job: it was deleted, or its folder was")
        except SourceError as error:
            return refusal(error.status, text(str(error)), error.ask)
        except Exception as error:  # a defect in one page must not keep others from being read
            logger.exception("%s", text(name))
            return refusal(500, f"the server has made a mistake ({type(error).__name__}): its output says more")
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers={"ETag": etag})
        return web.Response(body=body, content_type="application/json", headers={"ETag": etag})

    async def _made(self, reader: Reader, name: str, make: Callable[[Source], Any]) -> tuple[bytes, str]:
        place = reader.number, name
        kept = self._kept.setdefault(place, _Kept())
        self._kept.move_to_end(place)
        async with kept.lock:
            if time.monotonic() >= kept.until:
                try:
                    async with self._turn:
                        kept.body = await asyncio.to_thread(lambda: orjson.dumps(make(reader.source)))
                except BaseException:
                    self._kept.pop(place, None)
                    raise
                kept.etag = f'"{hashlib.blake2b(kept.body, digest_size=16).hexdigest()}"'
                kept.until = time.monotonic() + reader.source.seconds
                self._drop()
            return kept.body, kept.etag

    def _drop(self) -> None:
        """Drop the answers that were asked for longest ago, until the others are few and small enough."""
        held = sum(len(kept.body) for kept in self._kept.values())
        while len(self._kept) > _MAX_KEPT or held > _MAX_KEPT_BYTES:
            held -= len(self._kept.popitem(last=False)[1].body)


def _key(request: web.Request) -> str:
    key = request.query.get("key", "")
    if not 0 < len(key) <= _MAX_KEY:
        raise _bad("`key` must name a job")
    return key


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    given = request.query.get(name, str(default))
    if not (given.isascii() and given.isdigit() and len(given) <= 9):
        raise _bad(f"`{name}` must be a whole number")
    return min(int(given), most)


def _bad(sentence: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(text=orjson.dumps({"error": sentence}).decode(), content_type="application/json")


class _Static:
    """The files of the page, read once: no request leads to any other file."""

    def __init__(self) -> None:
        found = {file.name: file for file in (files("disttrain_dashboard") / "static").iterdir()}
        self._files = {
            name: (file.read_bytes(), kind)
            for name, file in found.items()
            if (kind := _TYPES.get(name.rpartition(".")[2])) is not None
        }

    async def answer(self, request: web.Request) -> web.Response:
        body, kind = self._files.get(request.match_info["name"] or "index.html", (None, ""))
        if body is None:
            return refusal(404, "no such page")
        return web.Response(body=body, content_type=kind, charset="utf-8")
