"""Keeps a cache equal to the API server: list, watch from there, and list again when the watch has lost its place.

    list ──► replace (a diff: what vanished unseen is deleted here, too)
      │
    watch ──► events, bookmarks ──► the stream ends, is reset, or falls silent: watch again from the last event
      │
    410 (as event or as answer), any other ERROR event, several failures in a row: list again

Nothing the server says ends an informer; it waits a little longer after each failure, at most `MAX_DELAY`.
"""

import logging

from disttrain_operator.kube.cache import Listing, Raw
from disttrain_operator.kube.errors import Throttled, Unavailable
from disttrain_operator.kube.watch import EMPTY_WATCHES_BEFORE_RELIST, BrokenStreamError, Watch

logger = logging.getLogger(__name__)


class Informer(Watch):
    """Fills `cache` with the objects below `path`. Run it as a task."""

    async def run(self) -> None:
        """Never returns."""
        try:
            await self._go_on()
        finally:
            self._large.close()

    async def _go_on(self) -> None:
        while True:
            try:
                await self._list()
                await self._follow()
            except Exception as error:
                await self._list_later(error)

    async def catch_up(self) -> None:
        """See `Watch`. Raises a KubeError if the API server does not answer."""
        version = await self._take_list(older=False)
        if version is not None:
            self._is_as_of(version)

    def _took(self, kind: str, raw: Raw) -> None:
        self.cache.apply(kind, raw, self.within)

    async def _list(self) -> None:
        self._begin_to_list()
        version = await self._take_list(older=True)
        assert version is not None
        self._listed(version)

    async def _take_list(self, *, older: bool) -> int | None:
        """List everything. `older`: also where the cache is newer, for its place in history is lost.

        Return the version of the list; None where it was not taken in.
        """
        self.tried_at = self._clock()
        listing: Listing | None = None
        version: int | None = None
        # Pages are taken in one by one: of the whole list no second copy is ever held.
        async for page in self._list_pages():
            self._record_answer()
            if version is None:
                version = page.version
                # The watch may have brought what is newer than this list.
                if older or version > self.cache.progress(self.within):
                    listing = self.cache.listing(version, self.within)
            if listing is not None:
                listing.take(page.objects, page.unreadable)
        if listing is None or version is None:
            await self._large.taken()
            return None
        listing.end()
        return version

    async def _follow(self) -> None:
        """Watches, and watches again, until the place in history is lost."""
        empty_watches = 0
        while empty_watches < EMPTY_WATCHES_BEFORE_RELIST:
            answered_before = self.answered_at
            try:
                await self._watch()
            except (Unavailable, Throttled) as error:
                logger.debug("%s: watching again: %s", self.path, error)
            empty_watches += 1
            if self.answered_at != answered_before:
                empty_watches = self._failures = 0
            await self._pause()
        raise BrokenStreamError(f"{empty_watches} watches in a row brought nothing")
