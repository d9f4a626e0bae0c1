"""Keeps a cache equal to the API server: list, watch from there, and list again when the watch has lost its place.

    list ──► replace (a diff: what vanished unseen is deleted here, too)
      │
    watch ──► events, bookmarks ──► the stream ends, is reset, or falls silent: watch again from the last event
      │
    410 (as event or as answer), any other ERROR event, a line that is no JSON, several failures in a row: list again

Nothing the server says ends an informer; it waits a little longer after each failure, at most `MAX_DELAY`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson

from disttrain_operator.kube.cache import Cache, Raw
from disttrain_operator.kube.client import Client, Query
from disttrain_operator.kube.errors import Expired, KubeError, Throttled, Unavailable, error_of_status

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.05
MAX_DELAY = 1.0
FRUITLESS_BEFORE_RELIST = 5
# The server sends a bookmark about every 60 seconds: a stream that is silent for longer is dead.
SILENCE_SECONDS = 75.0
# The server ends a watch after this time; a new one may land on another API server.
WATCH_SECONDS = 280


class BrokenStreamError(Exception):
    """The stream said something that is no event; its place in history is not to be trusted."""


class Informer:
    """Fills `cache` with the objects below `path`. Run it as a task."""

    def __init__(
        self,
        client: Client,
        path: str,
        cache: Cache,
        *,
        selector: str | None = None,
        silence: float = SILENCE_SECONDS,
        chunk: int = 500,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self.path, self.cache = client, path, cache
        self._query: Query = {"labelSelector": selector} if selector else {}
        self._silence, self._chunk, self._clock = silence, chunk, clock
        self._synced = asyncio.Event()
        self._failures = 0
        self.tried_at = clock()
        """When this informer last did anything; far in the past means that it hangs."""
        self.heard_at: float | None = None
        """When the server was last heard of."""
        self.lists = 0
        """How often everything was listed."""

    async def wait_synced(self) -> None:
        """Returns after the first complete list."""
        await self._synced.wait()

    async def run(self) -> None:
        """Never returns."""
        while True:
            try:
                await self._list()
                await self._follow()
            except (Expired, BrokenStreamError) as error:
                logger.info("%s: listing again: %s", self.path, error)
                await self._pause()
            except KubeError as error:
                if self._failures % 20 == 0:
                    logger.warning("%s cannot be watched, trying again: %s", self.path, error)
                await self._pause()
            except Exception:
                logger.exception("%s: listing again after an unexpected error", self.path)
                await self._pause()

    async def catch_up(self) -> None:
        """Returns when the cache is no older than this call. Raises a KubeError where nobody answers."""
        objects, version = await self._listed()
        # The watch may have brought what is newer than this list meanwhile.
        if version > self.cache.progress:
            self.cache.replace(objects, version)

    async def _list(self) -> None:
        objects, version = await self._listed()
        self.lists += 1
        self.cache.replace(objects, version)
        self._synced.set()

    async def _listed(self) -> tuple[list[Raw], int]:
        self.tried_at = self._clock()
        objects: list[Raw] = []
        version = 0
        # Pages are trimmed one by one: the whole list of full objects would not be small.
        async for page in self._client.list_pages(self.path, self._query, self._chunk):
            self._heard()
            version = int(page["metadata"]["resourceVersion"])
            objects += [self.cache.trimmed(raw) for raw in page.get("items") or []]
        return objects, version

    async def _follow(self) -> None:
        """Watches, and watches again, until the place in history is lost."""
        fruitless = 0
        while fruitless < FRUITLESS_BEFORE_RELIST:
            heard_before = self.heard_at
            try:
                await self._watch()
            except (Unavailable, Throttled) as error:
                logger.debug("%s: watching again: %s", self.path, error)
            fruitless += 1
            if self.heard_at != heard_before:
                fruitless = self._failures = 0
            await self._pause()
        raise BrokenStreamError(f"{fruitless} watches in a row brought nothing")

    async def _watch(self) -> None:
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(self.cache.progress),
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        self.tried_at = self._clock()
        async with self._client.stream(self.path, query, silence=self._silence) as chunks:
            async for line in _lines(chunks):
                self._heard()
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            event = orjson.loads(line)
            kind, raw = event["type"], event["object"]
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise BrokenStreamError(f"no event: {line[:200]!r}") from error
        match kind:
            case "ADDED" | "MODIFIED" | "DELETED":
                self.cache.apply(kind, raw)
            case "BOOKMARK":
                self.cache.bookmark(int(raw["metadata"]["resourceVersion"]))
            case "ERROR":
                self._raise(raw)
            case _:
                raise BrokenStreamError(f"an event of type {kind!r}")

    def _raise(self, status: dict[str, Any]) -> None:
        error = error_of_status(int(status.get("code") or 500), status)
        if isinstance(error, Expired):
            raise error
        raise BrokenStreamError(str(error))

    def _heard(self) -> None:
        self.tried_at = self.heard_at = self._clock()

    async def _pause(self) -> None:
        delay = min(FIRST_DELAY * 2 ** min(self._failures, 10), MAX_DELAY) if self._failures else 0.0
        self._failures += 1
        self.tried_at = self._clock()
        await asyncio.sleep(delay)


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Complete lines of any length; a last one without an end is dropped, its event will come again."""
    rest = b""
    async for chunk in chunks:
        first, newline, others = chunk.partition(b"\n")
        rest += first
        if not newline:
            continue
        yield rest
        complete = others.split(b"\n")
        rest = complete.pop()
        for line in complete:
            yield line
