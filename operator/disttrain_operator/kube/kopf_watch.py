"""The jobs of the cluster or of a namespace, as kopf lists and watches them.

kopf asks, its handler of events takes what was found into the cache (`take`); nobody else does. What kopf cannot bear
is kept from it here:

- it ends at an object that its parser cannot read, and at an ERROR other than 410. So it gets of each event which
  object it is about, and no more. What is to be kept of the object lies at hand until the handler asks for it;
- when it lists again it does not say what was deleted meanwhile. The cache learns which objects a list had, once the
  handler has taken all of them: then the watch begins;
- requests that fail would end it, in time. Here they are repeated for ever, and kopf waits for the answer.

    kopf: list ──► a page, of which it gets what is new ──► ... ──► watch ──► events ──► the stream ends: watch again
      ▲                                                               │
      └── 410, where the place in history is lost ◄────────────────────┘
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import orjson

from disttrain_operator.kube.cache import Cache, Listing, Raw, version_of
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import Throttled, Unavailable
from disttrain_operator.kube.lists import Page
from disttrain_operator.kube.tolerant import Unreadable
from disttrain_operator.kube.watch import EMPTY_WATCHES_BEFORE_RELIST, SILENCE_SECONDS, BrokenStreamError, Watch

logger = logging.getLogger(__name__)

AT_ONCE = 200
"""Events that wait for kopf, and again such that it has got and has not come to: it makes a task and a queue
for each job among them."""
GONE = b'{"type":"ERROR","object":{"kind":"Status","code":410}}\n'
"""After which kopf lists again."""


class KopfWatch(Watch):
    """Answers kopf's lists and watches of one collection. One list and one watch at a time, as kopf asks."""

    def __init__(
        self,
        client: Client,
        path: str,
        cache: Cache,
        *,
        within: str | None = None,
        silence: float = SILENCE_SECONDS,
        chunk: int = 500,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """See `Watch`."""
        super().__init__(client, path, cache, within=within, silence=silence, chunk=chunk, clock=clock)
        self._at_hand: dict[str, Callable[[], None]] = {}
        """What is to be done when the handler is called for an object, by its uid."""
        self._of_list = set[str]()
        """Objects of the list that kopf is reading which the handler has not been called for."""
        self._all_taken = asyncio.Event()
        self._all_taken.set()
        self._pages: AsyncIterator[Page] | None = None
        self._listing: Listing | None = None
        self._version = 0
        """The version of the list that kopf is reading."""
        self._empty_watches = 0
        """So many watches in a row brought nothing."""
        self._lines = deque[bytes]()
        self._news = asyncio.Event()
        self._delivered = asyncio.Event()
        """kopf has got a further line."""
        self._wanted = asyncio.Event()
        """Somebody waits for a list that begins from now on."""
        self._begun = 0
        self._ended = asyncio.Condition()
        self._ended_at = 0
        """Which of the lists that have begun was the last that was taken in."""

    def take(self, uid: str) -> bool:
        """kopf's handler was called for this object. Returns whether there was something to take in."""
        take = self._at_hand.pop(uid, None)
        self._news.set()
        self._of_list.discard(uid)
        if not self._of_list:
            self._all_taken.set()
        if take is not None:
            take()
        return take is not None

    async def catch_up(self) -> None:
        """Returns when the cache is no older than this call: when kopf has listed anew."""
        wanted = self._begun + 1
        self._wanted.set()
        async with self._ended:
            await self._ended.wait_for(lambda: self._ended_at >= wanted)

    async def page(self, following: bool) -> dict[str, Any]:
        """The first page of a list, or the one that follows, as an answer to kopf. Never fails."""
        while True:
            try:
                return await self._next_page(following)
            except Exception as error:
                following = False
                await self._list_later(error)

    async def events(self) -> AsyncIterator[bytes]:
        """The lines of a watch from where the last one ended; the last of them may say that kopf is to list again."""
        await self._end_list()
        watching = asyncio.create_task(self._watch_once())
        watching.add_done_callback(lambda _: self._news.set())
        try:
            while True:
                self._news.clear()
                while self._lines and len(self._at_hand) - len(self._lines) < AT_ONCE:
                    line = self._lines.popleft()
                    self._delivered.set()
                    yield line + b"\n"
                if watching.done() and not self._lines:
                    break
                await self._news.wait()
            if watching.result():
                yield GONE
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    def close(self) -> None:
        """Nobody asks any more."""
        self._large.close()

    async def _next_page(self, following: bool) -> dict[str, Any]:
        self.tried_at = self._clock()
        # Only one page at a time is held here and in the queues of kopf.
        await self._all_taken.wait()
        if not following or self._pages is None or self._listing is None:
            self._wanted.clear()
            self._begun += 1
            self._begin_to_list()
            self._pages, self._listing = self._list_pages(), None
        page = await anext(self._pages)
        self._record_answer()
        if self._listing is None:
            self._version = page.version
            self._listing = self.cache.listing(page.version, self.within)
        if not page.following:
            self._pages = None
        return {
            "kind": "List",
            "metadata": {"resourceVersion": str(page.version), "continue": page.following},
            "items": [*self._offer(page, self._listing)],
        }

    def _offer(self, page: Page, listing: Listing) -> list[Raw]:
        """Return what kopf receives of a page: the objects that are new or have changed."""
        identities = []
        for raw in page.objects:
            uid = raw["metadata"]["uid"]
            listing.saw(uid)
            if self.cache.get(uid) is not raw:
                self._at_hand[uid] = partial(self.cache.take_listed, raw, page.version, self.within)
                identities.append(_identity(raw))
        for found in page.unreadable:
            listing.saw(found.uid)
            self._at_hand[found.uid] = partial(self.cache.skip, found)
            identities.append(_identity_of(found))
        self._of_list = {identity["metadata"]["uid"] for identity in identities}
        if self._of_list:
            self._all_taken.clear()
        return identities

    async def _end_list(self) -> None:
        """Once the handler has taken what the list had, nothing else is there."""
        if self._listing is None:
            return
        await self._all_taken.wait()
        self._listing.end()
        self._listing = None
        self._empty_watches = 0
        self._listed(self._version)
        async with self._ended:
            self._ended_at = self._begun
            self._ended.notify_all()

    async def _watch_once(self) -> bool:
        """Watch until the stream ends. Returns whether the place in history is lost."""
        answered_before = self.answered_at
        try:
            if not self._wanted.is_set():
                await self._watch_unless_wanted()
        except (Unavailable, Throttled) as error:
            logger.debug("%s: watching again: %s", self.path, error)
        except Exception as error:
            await self._list_later(error)
            return True
        self._empty_watches += 1
        if self.answered_at != answered_before:
            self._empty_watches = self._failures = 0
        if self._wanted.is_set():
            return True
        if self._empty_watches >= EMPTY_WATCHES_BEFORE_RELIST:
            await self._list_later(BrokenStreamError(f"{self._empty_watches} watches in a row brought nothing"))
            return True
        await self._pause()
        return False

    async def _watch_unless_wanted(self) -> None:
        """Watch until the stream ends, or somebody wants a list."""
        watch, wanted = asyncio.create_task(self._watch()), asyncio.create_task(self._wanted.wait())
        try:
            await asyncio.wait({watch, wanted}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
        finally:
            for task in (watch, wanted):
                task.cancel()
            await asyncio.gather(watch, wanted, return_exceptions=True)

    def _took(self, kind: str, raw: Raw) -> None:
        identity, known = _identity(raw), self.cache.get(raw["metadata"]["uid"])
        self.cache.bookmark(version_of(raw), self.within)
        # The answer to a write of ours may have said it before.
        if kind == "DELETED" or known is None or version_of(known) < version_of(raw):
            self._deliver(kind, identity, partial(self._apply, kind, raw))

    async def _wait_for_room(self) -> None:
        while len(self._lines) >= AT_ONCE:
            self._delivered.clear()
            await self._delivered.wait()

    def _left_out(self, kind: str, found: Unreadable) -> None:
        self._deliver(kind, _identity_of(found), partial(super()._left_out, kind, found))

    def _deliver(self, kind: str, identity: Raw, take: Callable[[], None]) -> None:
        # Where kopf has not come to an earlier event of this object, the handler takes this one at once.
        self._at_hand[identity["metadata"]["uid"]] = take
        self._lines.append(orjson.dumps({"type": kind, "object": identity}))
        self._news.set()

    def _apply(self, kind: str, raw: Raw) -> None:
        try:
            self.cache.apply(kind, raw, self.within)
        except Exception as error:
            found = self.cache.unread(raw, error)
            if found is None:
                self._missed = True
            else:
                super()._left_out(kind, found)


def _identity(raw: Raw) -> Raw:
    """Return what kopf receives of an object. Raises for one of an odd shape."""
    metadata = raw["metadata"]
    if not isinstance(metadata["uid"], str):
        raise TypeError("metadata.uid is no string")
    names = {key: str(metadata.get(key, "")) for key in ("namespace", "name")}
    return {"metadata": {**names, "uid": metadata["uid"], "resourceVersion": str(version_of(raw))}}


def _identity_of(found: Unreadable) -> Raw:
    names = {"namespace": found.namespace, "name": found.name}
    return {"metadata": {**names, "uid": found.uid, "resourceVersion": str(found.version)}}
