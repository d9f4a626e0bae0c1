"""List and watch, line by line, for the informer (informer.py) or kopf (kopf_watch.py).

An object that cannot be taken in is stepped over, in lists and in watches: it is marked as unreadable, and the watch
goes on behind it. Where an event does not even say which object it is about, everything is to be listed again, but at
most every `RELIST_SECONDS`: who changes such an object all the time must not make the operator list all the time.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson

from disttrain_operator.kube.cache import Cache, Raw, version_of
from disttrain_operator.kube.client import Client, Query
from disttrain_operator.kube.errors import Expired, KubeError, Throttled, Unavailable, error_of_status
from disttrain_operator.kube.large_events import LargeEvents
from disttrain_operator.kube.lists import MAX_OBJECT_BYTES, TOO_LARGE, Page, list_pages
from disttrain_operator.kube.tolerant import Unreadable, read_event, why_not

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.05
MAX_DELAY = 1.0
EMPTY_WATCHES_BEFORE_RELIST = 5
# The server sends a bookmark about every 60 seconds: a stream that is silent for longer is dead.
SILENCE_SECONDS = 75.0
# The server ends a watch after this time; a new one may land on another API server.
WATCH_SECONDS = 280
RELIST_SECONDS = 60.0
# How much of an event is looked at to find which object it is about: some 10 ms of work.
MAX_TOKENS = 50_000

_OF_OBJECTS = ("ADDED", "MODIFIED", "DELETED")


class BrokenStreamError(Exception):
    """The stream contained something that is no event; its resourceVersion cannot be trusted."""


class Watch(ABC):
    """The objects below `path`, for `cache`. Subclasses define who lists, and what happens to an event."""

    def __init__(
        self,
        client: Client,
        path: str,
        cache: Cache,
        *,
        selector: str | None = None,
        within: str | None = None,
        silence: float = SILENCE_SECONDS,
        chunk: int = 500,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`within`: the namespace that `path` is of, where others fill the cache with other namespaces."""
        self.within = within
        self._client, self.path, self.cache = client, path, cache
        self._query: Query = {"labelSelector": selector} if selector else {}
        self._silence, self._chunk, self._clock = silence, chunk, clock
        self._synced = asyncio.Event()
        self._failures = 0
        self.tried_at: float | None = None
        """When this informer last did anything; far in the past means that it hangs. None: it has not begun."""
        self.answered_at: float | None = None
        """When the server has sent something last."""
        self.lists = 0
        """How often everything was listed."""
        self.failing_since: float | None = None
        """Since when lists and watches have failed, though the server answers; None where they do not."""
        self._listed_at = clock()
        self._listed_version = 0
        self._missed = False
        self._large = LargeEvents(cache.trimmed, cache.unread, self._take_late, self._step_over)

    @property
    def synced(self) -> bool:
        """Whether the cache holds what this informer lists."""
        return self.cache.synced(self.within)

    @property
    def objects(self) -> int:
        """How many objects of what this informer lists the cache holds."""
        return self.cache.count(self.within)

    @property
    def unreadable(self) -> int:
        """How many of them cannot be read."""
        return sum(self.within in (None, found.namespace) for found in self.cache.unreadable())

    async def wait_synced(self) -> None:
        """Returns after the first complete list."""
        await self._synced.wait()

    @abstractmethod
    async def catch_up(self) -> None:
        """Return when the cache is no older than this call. May raise a KubeError if the API server does not answer."""

    @abstractmethod
    def _took(self, kind: str, raw: Raw) -> None:
        """An event of an object that could be read. Raises for one that is odd."""

    async def _wait_for_room(self) -> None:  # noqa: B027
        """Returns when a further event can be taken: an informer has taken each before the next."""

    def _left_out(self, kind: str, found: Unreadable) -> None:
        """An event of an object that could not."""
        if kind == "DELETED":
            self.cache.forget(found)
        else:
            self.cache.skip(found)

    def _list_pages(self) -> AsyncIterator[Page]:
        """All that there is, trimmed."""
        return list_pages(
            self._client, self.path, self._query, self._chunk, trim=self.cache.trimmed, unread=self.cache.unread
        )

    def _begin_to_list(self) -> None:
        self._listed_at, self._missed = self._clock(), False
        self._large.drop_all()

    def _is_as_of(self, version: int) -> None:
        """Nothing older than this version is to be taken in any more."""
        self._listed_version = version
        self._large.drop_until(version)

    def _listed(self, version: int) -> None:
        """All was taken in that there was at this version."""
        self._is_as_of(version)
        self.lists += 1
        self.failing_since = None
        self._synced.set()

    async def _list_later(self, error: Exception) -> None:
        """Say why everything is to be listed again, and wait a little, longer after each failure."""
        if isinstance(error, Expired | BrokenStreamError):
            logger.info("%s: listing again: %s", self.path, error)
        elif not isinstance(error, KubeError):
            logger.error("%s: listing again after an unexpected error", self.path, exc_info=error)
        elif (self._failures + 1) % 20 == 0:
            logger.warning("%s cannot be watched, trying again: %s", self.path, error)
        self._note_failure(error)
        await self._pause()

    async def _watch(self) -> None:
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(self.cache.progress(self.within)),
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        self.tried_at = self._clock()
        async with self._client.stream(self.path, query, silence=self._silence) as chunks:
            async for line in lines(chunks):
                self._record_answer()
                self.failing_since = None
                if not await self._large.put(line):
                    self._take(line)
                await self._wait_for_room()
                if self._missed and self._clock() - self._listed_at >= RELIST_SECONDS:
                    raise BrokenStreamError("an event does not name its object")

    def _take(self, line: bytes) -> None:
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            why = TOO_LARGE if len(line) >= MAX_OBJECT_BYTES else why_not(error)
            kind, found = read_event(line, why, MAX_TOKENS)
            if found is not None:
                self._large.drop(found.uid)
            self._step_over(kind, found)
            return
        try:
            kind, raw = event["type"], event["object"]
        except (KeyError, TypeError) as error:
            raise BrokenStreamError(f"no event: {line[:200]!r}") from error
        match kind:
            case "ADDED" | "MODIFIED" | "DELETED":
                self._take_object(kind, raw)
            case "BOOKMARK":
                self.cache.bookmark(int(raw["metadata"]["resourceVersion"]), self.within)
            case "ERROR":
                self._raise(raw)
            case _:
                raise BrokenStreamError(f"an event of type {kind!r}")

    def _take_object(self, kind: str, raw: Raw) -> None:
        try:
            self._large.drop(raw["metadata"]["uid"])
            self._took(kind, raw)
        except Exception as error:
            self._step_over(kind, self.cache.unread(raw, error))

    def _take_late(self, kind: str, kept: Raw) -> None:
        """An event of much text, read while others were taken. A list says more than an event before it."""
        if version_of(kept) > self._listed_version:
            try:
                self._took(kind, kept)
            except Exception as error:
                self._step_over(kind, self.cache.unread(kept, error))

    def _step_over(self, kind: str, found: Unreadable | None) -> None:
        if found is None or kind not in _OF_OBJECTS:
            self._missed = True
            return
        self.cache.bookmark(found.version, self.within)
        self._left_out(kind, found)

    def _raise(self, status: dict[str, Any]) -> None:
        error = error_of_status(int(status.get("code") or 500), status)
        if isinstance(error, Expired):
            raise error
        raise BrokenStreamError(str(error))

    def _record_answer(self) -> None:
        self.tried_at = self.answered_at = self._clock()

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, Unavailable | Throttled):
            # Nothing is known of what would be answered.
            self.failing_since = None
        elif self.failing_since is None:
            self.failing_since = self._clock()

    async def _pause(self) -> None:
        delay = min(FIRST_DELAY * 2 ** min(self._failures, 10), MAX_DELAY) if self._failures else 0.0
        self._failures += 1
        self.tried_at = self._clock()
        await asyncio.sleep(delay)


async def lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Complete lines; a last one without an end is dropped, its event will come again.

    A line that is longer than an object may be comes without its end, which its parser will notice.
    """
    parts, size = list[bytes](), 0
    async for chunk in chunks:
        first, newline, others = chunk.partition(b"\n")
        if size < MAX_OBJECT_BYTES:
            parts.append(first)
            size += len(first)
        if not newline:
            continue
        yield b"".join(parts)
        complete = others.split(b"\n")
        parts = [complete.pop()]
        size = len(parts[0])
        for line in complete:
            yield line
