"""Watch events of much text: read beside the loop, of each object the newest alone, namespaces in turns.

To decode and to trim a job of a megabyte takes some 50 ms, and its owner may change it twenty times a second. So of
such an event is found at once only which object it is about, in a thread; its text waits, instead of the one that waits
for the same object. Where too much waits, the namespace that has most of it gives way: an object of it is kept as a
name until it is listed again.

Events of little text are taken at once: what waits of the same object is older then, and dropped. An older version that
is being read meanwhile does no harm: the cache does not go back, and where the object was deleted it is dropped, too.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson

from disttrain_operator.fair_queue import FairQueue
from disttrain_operator.kube.client import TOO_MANY_PARTS
from disttrain_operator.kube.identity import event_identity
from disttrain_operator.kube.lists import MAX_OBJECT_BYTES, TOO_LARGE
from disttrain_operator.kube.one_at_a_time import in_thread
from disttrain_operator.kube.sizes import LARGE_BYTES, MAX_PARSED_BYTES, parsed_size
from disttrain_operator.kube.tolerant import Unreadable, why_not

Raw = dict[str, Any]

MAX_WAITING_BYTES = 16 * 2**20
"""So much text waits in one watch at most."""
TOO_FAST = "objects of its namespace change faster than they can be read"
WHAT_TO_DO = "Change them less often; it is read again in a while"


@dataclass(frozen=True)
class _Event:
    """An event that waits."""

    kind: str
    line: bytes
    about: Unreadable
    done: asyncio.Event
    """Set when it was taken, or an older or newer one of the same object."""


class LargeEvents:
    """Large events of one watch. `take` is called with the cache entry of an object, `step_over` with an unreadable
    object."""

    def __init__(
        self,
        trim: Callable[[Raw], Raw],
        unread: Callable[[Any, Exception], Unreadable | None],
        take: Callable[[str, Raw], None],
        step_over: Callable[[str, Unreadable | None], None],
        *,
        most: int = MAX_WAITING_BYTES,
    ) -> None:
        self._trim, self._unread, self._take, self._step_over, self._most = trim, unread, take, step_over, most
        self._waiting: dict[str, _Event] = {}
        """By uid."""
        self._bytes: Counter[str] = Counter()
        """How much waits, by namespace."""
        self._turns: FairQueue[str] = FairQueue()
        self._in_line = set[str]()
        self._reading: _Event | None = None
        """What is being read. None: nothing, or what is to be dropped."""
        self._task: asyncio.Task[None] | None = None

    async def put(self, line: bytes) -> bool:
        """Take an event that is large; returns False where it is not, or is about no object."""
        if len(line) <= LARGE_BYTES:
            return False
        found = await asyncio.to_thread(event_identity, line, TOO_FAST)
        if found is None:
            return False
        kind, about = found
        if about is None:
            self._step_over(kind, None)
            return True
        older = self._remove(about.uid)
        if not self._make_room(about.namespace, len(line)):
            self._leave_out(_Event(kind, line, about, asyncio.Event() if older is None else older.done))
            return True
        self._waiting[about.uid] = _Event(kind, line, about, asyncio.Event() if older is None else older.done)
        self._bytes[about.namespace] += len(line)
        if about.uid not in self._in_line:
            self._in_line.add(about.uid)
            self._turns.push(about.namespace, about.uid)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        return True

    def drop(self, uid: str) -> None:
        """Something newer is known of this object."""
        event = self._remove(uid)
        if event is not None:
            event.done.set()
        if self._reading is not None and self._reading.about.uid == uid:
            self._reading.done.set()
            self._reading = None

    def drop_until(self, version: int) -> None:
        """All is known that happened up to this version."""
        known = [*self._waiting.values(), *([self._reading] if self._reading else [])]
        for event in known:
            if event.about.version <= version:
                self.drop(event.about.uid)

    def drop_all(self) -> None:
        """Drop all events: everything is listed again, or no longer needed."""
        for uid in [*self._waiting, *([self._reading.about.uid] if self._reading else [])]:
            self.drop(uid)

    async def taken(self) -> None:
        """Returns when all has been taken that waits now."""
        waiting = [*self._waiting.values(), *([self._reading] if self._reading else [])]
        await asyncio.gather(*(event.done.wait() for event in waiting))

    def close(self) -> None:
        """Read no more."""
        self.drop_all()
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        try:
            while self._turns.ready:
                uid = self._turns.pop()
                self._in_line.discard(uid)
                event = self._remove(uid)
                if event is None:
                    continue  # it was dropped
                self._reading = event
                kept, left_out = await in_thread(partial(self._read, event))
                if self._reading is not event:
                    continue
                self._reading = None
                if kept is not None:
                    self._take(event.kind, kept)
                else:
                    self._step_over(event.kind, left_out)
                event.done.set()
        finally:
            self._task = None

    def _read(self, event: _Event) -> tuple[Raw | None, Unreadable | None]:
        if parsed_size(event.line) > MAX_PARSED_BYTES:
            return None, replace(event.about, why=TOO_MANY_PARTS)
        try:
            raw = orjson.loads(event.line)["object"]
        except orjson.JSONDecodeError as error:
            why = TOO_LARGE if len(event.line) >= MAX_OBJECT_BYTES else why_not(error)
            return None, replace(event.about, why=why)
        try:
            return self._trim(raw), None
        except Exception as error:
            return None, self._unread(raw, error)

    def _remove(self, uid: str) -> _Event | None:
        event = self._waiting.pop(uid, None)
        if event is not None:
            namespace = event.about.namespace
            self._bytes[namespace] -= len(event.line)
            if not self._bytes[namespace]:
                del self._bytes[namespace]
        return event

    def _make_room(self, namespace: str, more: int) -> bool:
        while self._bytes and self._bytes.total() + more > self._most:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            if self._bytes[largest] <= self._bytes.get(namespace, 0) + more:
                return False
            uid = next(uid for uid, event in self._waiting.items() if event.about.namespace == largest)
            event = self._remove(uid)
            assert event is not None
            self._leave_out(event)
        return True

    def _leave_out(self, event: _Event) -> None:
        self._step_over(event.kind, replace(event.about, what_to_do=WHAT_TO_DO, needs=len(event.line)))
        event.done.set()
