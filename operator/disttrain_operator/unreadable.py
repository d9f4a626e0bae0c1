"""Says which objects could not be read: in the log, in a figure, and on a job by an Event of the replica that acts.

One object at a time, and the same one again only after a while: who changes such an object all the time, or makes
thousands of them, fills neither the log nor the cluster with Events.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial

from disttrain_api.names import PLURAL, Reason
from disttrain_operator.decide.decision import Event
from disttrain_operator.events import post_event
from disttrain_operator.kube.cache import Cache
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.tolerant import Unreadable
from disttrain_operator.snapshot import Key

logger = logging.getLogger(__name__)

SECONDS_BETWEEN = 1.0
SECONDS_BETWEEN_SAME = 300.0
MOST_REMEMBERED = 1000
WHAT_TO_DO = (
    "The operator leaves it and its pods as they are. Apply it again with fewer levels or less text, in"
    " `metadata.managedFields` too, or delete it."
)


class UnreadableReports:
    """Add the caches, then run it as a task. `acts` says whether this replica acts."""

    def __init__(
        self,
        client: Client,
        acts: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._client, self._acts, self._clock, self._sleep = client, acts, clock, sleep
        self._caches: list[tuple[str, Cache]] = []
        self._waiting: OrderedDict[str, tuple[str, Cache]] = OrderedDict()
        self._reported: OrderedDict[str, float] = OrderedDict()
        self._some = asyncio.Event()

    def add(self, plural: str, cache: Cache) -> None:
        """Report the objects of this cache that cannot be read."""
        self._caches.append((plural, cache))
        cache.on_unreadable = partial(self._note, plural, cache)

    def counts(self) -> dict[str, int]:
        """How many objects cannot be read now, by the plural of their kind."""
        found: dict[str, int] = {}
        for plural, cache in self._caches:
            found[plural] = max(found.get(plural, 0), len(cache.unreadable()))
        return found

    def begin(self) -> None:
        """This replica acts from now on: the Events that another should have posted are due."""
        self._reported.clear()
        for plural, cache in self._caches:
            for found in cache.unreadable():
                self._note(plural, cache, found)

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self._some.wait()
            uid, (plural, cache) = self._waiting.popitem(last=False)
            if not self._waiting:
                self._some.clear()
            found = next((entry for entry in cache.unreadable() if entry.uid == uid), None)
            if found is not None and self._is_due(uid):
                await self._report(plural, found)
                await self._sleep(SECONDS_BETWEEN)

    def _note(self, plural: str, cache: Cache, found: Unreadable) -> None:
        if len(self._waiting) < MOST_REMEMBERED and self._is_due(found.uid):
            self._waiting[found.uid] = plural, cache
            self._some.set()

    def _is_due(self, uid: str) -> bool:
        return self._clock() - self._reported.get(uid, -SECONDS_BETWEEN_SAME) >= SECONDS_BETWEEN_SAME

    async def _report(self, plural: str, found: Unreadable) -> None:
        self._reported[found.uid] = self._clock()
        self._reported.move_to_end(found.uid)
        while len(self._reported) > MOST_REMEMBERED:
            self._reported.popitem(last=False)
        where = f"{found.namespace}/{found.name}" if found.namespace else found.name
        logger.warning("%s %s (version %d) is left alone: %s", plural, where, found.version, found.why)
        if plural == PLURAL and self._acts():
            event = Event(Reason.UNREADABLE, f"This job cannot be read: {found.why}. {WHAT_TO_DO}", warning=True)
            key = Key(found.namespace, found.name, found.uid)
            await post_event(self._client, key, str(found.version), event, datetime.now(UTC))
