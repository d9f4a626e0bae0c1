"""Says which objects could not be read: in the log, in a figure, and on a job by an Event of the replica that acts.

One object at a time, namespaces in turns, and the same object again only after a while: a tenant that changes such an
object all the time, or makes thousands of them, fills neither the log nor the cluster with Events, and keeps no other
from its Event.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from functools import partial

from disttrain_api.names import PLURAL, Reason
from disttrain_operator.decide.decision import Event
from disttrain_operator.events import post_event
from disttrain_operator.fair_queue import FairQueue
from disttrain_operator.kube.cache import Cache
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.tolerant import Unreadable
from disttrain_operator.snapshot import Key

logger = logging.getLogger(__name__)

SECONDS_BETWEEN = 1.0
SECONDS_BETWEEN_SAME = 300.0
MOST_REPORTED = 1000
"""Objects of which it is remembered when they were reported; more than can be in SECONDS_BETWEEN_SAME."""
MOST_WAITING = 100
"""Objects of one namespace that wait to be reported."""
LEFT = "The operator leaves the job and its pods as they are"
WHAT_TO_DO = "Apply it again with fewer levels or less text, in `metadata.managedFields` too, or delete it"


class UnreadableReports:
    """Hears of the objects that `caches` cannot take in; run it as a task."""

    def __init__(
        self,
        client: Client,
        acts: Callable[[], bool],
        caches: Iterable[tuple[str, Cache]],
        *,
        owner: Callable[[str], Key | None] = lambda group: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`acts` says whether this replica acts, `owner` the job of a group of objects that belong to it. `caches` come
        with the plurals of their kinds."""
        self._owner, self._caches = owner, list(caches)
        self._client, self._acts, self._clock, self._sleep = client, acts, clock, sleep
        self._turns: FairQueue[tuple[str, str]] = FairQueue()
        self._waiting: dict[str, tuple[str, Cache]] = {}
        """By the object's uid; its turn is in `_turns`, by namespace."""
        self._waiting_in: Counter[str] = Counter()
        self._reported: OrderedDict[str, float] = OrderedDict()
        self._some = asyncio.Event()
        for plural, cache in self._caches:
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
            namespace, uid = self._turns.pop()
            plural, cache = self._waiting.pop(uid)
            self._waiting_in[namespace] -= 1
            if not self._waiting_in[namespace]:
                del self._waiting_in[namespace]
            if not self._turns.ready:
                self._some.clear()
            found = cache.find_unreadable(uid)
            if found is not None and self._is_due(uid):
                await self._report(plural, found)
                await self._sleep(SECONDS_BETWEEN)

    def _note(self, plural: str, cache: Cache, found: Unreadable) -> None:
        if (
            found.uid in self._waiting
            or self._waiting_in[found.namespace] >= MOST_WAITING
            or not self._is_due(found.uid)
        ):
            return
        self._waiting[found.uid] = plural, cache
        self._waiting_in[found.namespace] += 1
        self._turns.push(found.namespace, (found.namespace, found.uid))
        self._some.set()

    def _is_due(self, uid: str) -> bool:
        return self._clock() - self._reported.get(uid, -SECONDS_BETWEEN_SAME) >= SECONDS_BETWEEN_SAME

    async def _report(self, plural: str, found: Unreadable) -> None:
        self._reported[found.uid] = self._clock()
        self._reported.move_to_end(found.uid)
        while len(self._reported) > MOST_REPORTED:
            self._reported.popitem(last=False)
        where = f"{found.namespace}/{found.name}" if found.namespace else found.name
        logger.warning("%s %s (version %d) is left alone: %s", plural, where, found.version, found.why)
        informed = self._informed_job(plural, found)
        if informed is not None and self._acts():
            key, what = informed
            message = f"{what} cannot be read: {found.why}. {LEFT}. {found.what_to_do or WHAT_TO_DO}."
            event = Event(Reason.UNREADABLE, message, warning=True)
            await post_event(self._client, key, str(found.version), event, datetime.now(UTC))

    def _informed_job(self, plural: str, found: Unreadable) -> tuple[Key, str] | None:
        """Return the job that is informed, and what the object is to the job."""
        if plural == PLURAL:
            return Key(found.namespace, found.name, found.uid), "This job"
        key = self._owner(found.group) if found.group is not None else None
        return None if key is None else (key, f"Its `{found.name}` (of {plural})")
