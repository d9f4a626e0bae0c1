"""An HTTP session for kopf, which reads JSON by a parser that recurses, and ends when that cannot go on.

Of a list kopf is given the resourceVersion alone, from a page of one object (set `watching.chunk_size` to 1): all
objects have been listed by an informer, and kopf need only see what changes from then on. Of a watch it is given the
events of objects that nest like ordinary ones. What it is not given, the informer sees.
"""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp.connector import Connection
from yarl import URL

from disttrain_operator.kube.auth import Access
from disttrain_operator.kube.client import read_body
from disttrain_operator.kube.informer import lines
from disttrain_operator.kube.lists import MAX_OBJECT_BYTES, METADATA_ONLY, read_page

# An ordinary job has one or two hundred brackets. No text nests deeper than it has brackets.
MAX_BRACKETS = 300


def session(access: Access) -> aiohttp.ClientSession:
    """Return a new session; its token is the one of now."""
    tls = access.ssl_context()
    token = access.token()
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls if tls is not None else False),
        headers={"Accept": "application/json", **authorization},
        middlewares=(_ask_for_metadata_of_lists,),
        response_class=_Response,
    )


async def _ask_for_metadata_of_lists(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Ask for the metadata alone of the objects of a list.

    Not in a watch: a server accepts a watch for lists of metadata, and ends it at its first event.
    """
    if _is_list(request.url):
        request.headers["Accept"] = METADATA_ONLY
    return await handler(request)


def _is_list(url: URL) -> bool:
    """Return whether objects are listed. What kopf asks for without a limit is a watch, or which kinds there are."""
    return "limit" in url.query


def is_shallow(line: bytes) -> bool:
    """Return whether kopf is given this line of a watch."""
    return len(line) < MAX_OBJECT_BYTES and line.count(b"{") + line.count(b"[") <= MAX_BRACKETS


class _Response(aiohttp.ClientResponse):
    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        await super().start(connection)
        if self.status < 400 and self.url.query.get("watch") == "true":
            self.content = _ShallowLines(self.content)  # type: ignore[assignment]
        return self

    async def json(self, **options: Any) -> Any:
        if self.status >= 400 or not _is_list(self.url):
            return await super().json(**options)
        page = await read_page(await read_body(self, MAX_OBJECT_BYTES), self.url.path)
        return {"metadata": {"resourceVersion": str(page.version)}, "items": []}


class _ShallowLines:
    """A stream, read in chunks, that returns the shallow lines alone."""

    def __init__(self, stream: aiohttp.StreamReader) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        async for line in lines(self._stream.iter_any()):
            if is_shallow(line):
                yield line + b"\n"
