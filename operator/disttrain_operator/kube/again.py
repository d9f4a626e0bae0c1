"""Takes in what was left out for want of room, when there is room: by a list of that namespace alone.

No event comes when others delete something, and an object that is not changed has no event. One namespace at a time,
one list in `SECONDS_BETWEEN`: a tenant that fills its namespace and empties it all the time pays with lists of it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from disttrain_operator.kube.cache import Cache
from disttrain_operator.kube.client import Client, Query
from disttrain_operator.kube.errors import KubeError
from disttrain_operator.kube.lists import list_pages

logger = logging.getLogger(__name__)

SECONDS_BETWEEN = 15.0


class Collection(NamedTuple):
    """A cache, and the paths of its objects."""

    cache: Cache
    path_of: Callable[[str | None], str]
    """The path of a namespace's objects; of None or an empty one, that of all."""
    selector: str | None = None


async def take_in(client: Client, cache: Cache, path: str, selector: str | None = None) -> None:
    """Observe all that there is now; what the list lacks stays known. Raises a KubeError if it cannot be listed."""
    query: Query = {"labelSelector": selector} if selector else {}
    async for page in list_pages(client, path, query, trim=cache.trimmed, unread=cache.unread):
        for raw in page.objects:
            cache.observe(raw)
        for missing in page.unreadable:
            cache.skip(missing)


class Again:
    """Run it as a task."""

    def __init__(
        self,
        client: Client,
        collections: Sequence[Collection],
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._client, self._collections, self._sleep = client, collections, sleep
        self._turn: list[tuple[int, str]] = []

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self._sleep(SECONDS_BETWEEN)
            await self.once()

    async def once(self) -> None:
        """List a namespace of which there is something to take in, the one for which that was done longest ago."""
        found = self._with_room()
        if not found:
            return
        number, namespace = min(found, key=lambda one: self._turn.index(one) if one in self._turn else -1)
        self._turn = [one for one in self._turn if one in found and one != (number, namespace)]
        self._turn.append((number, namespace))
        cache, path_of, selector = self._collections[number]
        logger.info("%s: listing it again: there is room for what was left out", path_of(namespace))
        since = cache.marks_so_far()
        try:
            await take_in(self._client, cache, path_of(namespace), selector)
            cache.end_again(namespace, since)
        except KubeError as error:
            logger.info("%s: %s", path_of(namespace), error)

    def _with_room(self) -> Sequence[tuple[int, str]]:
        return [
            (number, namespace)
            for number, (cache, _, _) in enumerate(self._collections)
            for namespace in sorted(cache.with_room())
        ]
