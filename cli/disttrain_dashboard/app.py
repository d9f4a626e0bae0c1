"""The HTTP application: static files, and page data of a source as JSON with an ETag. It answers GET alone.

GET /                                  the page
GET /NAME                              its styles and modules
GET /api/jobs                          the list
GET /api/job?key=K                     a job
GET /api/log?key=K&rank=R&tail=N       the last lines of a rank's log
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from importlib.resources import files
from typing import Any

import orjson
from aiohttp import web

from disttrain_dashboard.guard import LOOPBACK, add_headers, guard, refusal
from disttrain_dashboard.source import Source, SourceError, UnknownJobError
from disttrain_dashboard.views.bounded import text
from disttrain_dashboard.views.listing import listing
from disttrain_dashboard.views.page import page
from disttrain_dashboard.views.ranks import MAX_RANKS

logger = logging.getLogger(__name__)

MAX_TAIL = 500
MAX_LINE = 2000
_MAX_KEY = 512
_MAX_KEPT = 64
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def application(source: Source, token: str, hosts: Collection[str] = LOOPBACK) -> web.Application:
    """Return the application. token: what a browser must know. hosts: names and addresses it is called by."""
    app = web.Application(middlewares=[guard(token, hosts)])
    app.on_response_prepare.append(add_headers)
    pages = _Pages(source)
    app.router.add_get("/api/jobs", pages.jobs)
    app.router.add_get("/api/job", pages.job)
    app.router.add_get("/api/log", pages.log)
    app.router.add_get("/{name:[^/]*}", _Static().answer)
    return app


class _Kept:
    """An answer and how long it holds. Who asks meanwhile waits for it."""

    def __init__(self) -> None:
        self.lock, self.until, self.body, self.etag = asyncio.Lock(), 0.0, b"", ""


class _Pages:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    async def jobs(self, request: web.Request) -> web.Response:
        return await self._answer(request, "", lambda: listing(self._source.jobs(), self._source.title))

    async def job(self, request: web.Request) -> web.Response:
        key = _key(request)
        return await self._answer(request, f"job {key}", lambda: page(self._source.job(key)))

    async def log(self, request: web.Request) -> web.Response:
        key, rank = _key(request), _number(request, "rank", 0, MAX_RANKS)
        tail = max(_number(request, "tail", 100, MAX_TAIL), 1)

        def make() -> Any:
            return {"lines": [text(line, MAX_LINE) for line in self._source.log(key, rank, tail)[-tail:]]}

        return await self._answer(request, f"log {key} {rank} {tail}", make)

    async def _answer(self, request: web.Request, name: str, make: Callable[[], Any]) -> web.Response:
        """Answer with what `make` returns, or has returned a moment ago; 304 if the browser has it already."""
        kept = self._kept.setdefault(name, _Kept())
        self._kept.move_to_end(name)
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        try:
            async with kept.lock:
                if time.monotonic() >= kept.until:
                    kept.body = await asyncio.to_thread(lambda: orjson.dumps(make()))
                    kept.etag = hashlib.blake2b(kept.body, digest_size=16).hexdigest()
                    kept.until = time.monotonic() + self._source.seconds
                body, etag = kept.body, f'"{kept.etag}"'
        except UnknownJobError:
            return refusal(404, "no such job: it was deleted, or its folder was")
        except SourceError as error:
            return refusal(503, text(str(error)))
        except Exception as error:  # a defect in one page must not keep others from being read
            logger.exception("%s", name or "jobs")
            return refusal(500, f"the server has made a mistake ({type(error).__name__}): its output says more")
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers={"ETag": etag})
        return web.Response(body=body, content_type="application/json", headers={"ETag": etag})


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
