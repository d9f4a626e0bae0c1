"""Which keys are to be looked at, and when. Says nothing of what they are.

Keys belong to groups, which take turns: a group with thousands of keys delays another by one key at a time, and never
has all workers. A key is in the queue once, however often it is added; while one worker holds it no other gets it, and
what is added meanwhile makes it come again.

Three ways to come later:

- `add(key, delay)`: at the earliest of all delays asked for; a plain `add` is "now".
- `retry(key)`: after a failure; the delay doubles with each one until `forget(key)`, and is never less than asked for.
  A plain `add` still means now: something changed, so it is worth trying.
- `hold(key, seconds)`: not before, whatever is added. For keys that cost more than they may. What is urgent may come
  before, and after it a rest of its own: so no stream of urgent news takes all the time.
"""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from disttrain_operator.fair_queue import FairQueue

Key = TypeVar("Key")

FIRST_DELAY = 0.1
MAX_DELAY = 30.0
# Alarms that sooner ones have overtaken are dropped when they are more than those that count, and more than this.
_STALE_ALARMS = 64


class WorkQueue(Generic[Key]):
    """For any number of workers in one loop: `key = await get()`, work, `done(key)`."""

    def __init__(
        self,
        *,
        group_of: Callable[[Key], str] = lambda key: "",
        limit: Callable[[str], int] | None = None,
        first_delay: float = FIRST_DELAY,
        max_delay: float = MAX_DELAY,
    ) -> None:
        """`limit`: how many keys of a group workers hold at a time, one at least."""
        self._group_of, self._first_delay, self._max_delay = group_of, first_delay, max_delay
        self._ready: FairQueue[Key] = FairQueue(limit)
        self._queued: set[Key] = set()
        self._taken: set[Key] = set()
        self._again: set[Key] = set()
        self._due: dict[Key, float] = {}
        self._timers: list[tuple[float, int, Key]] = []
        self._held: dict[Key, tuple[float, float]] = {}
        """Until when nothing usual comes, and nothing urgent."""
        self._urgent: set[Key] = set()
        self._hurried: set[Key] = set()
        """Keys that are taken, and were urgent."""
        self._failures: dict[Key, int] = {}
        self._numbers = itertools.count()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._alarm: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Keys that wait for a worker now."""
        return len(self._ready)

    def __iter__(self) -> Iterator[Key]:
        """Keys that wait for a worker now, group by group."""
        return iter(self._ready)

    @property
    def ready(self) -> bool:
        """Whether a worker would get a key now."""
        return self._ready.ready

    def add(self, key: Key, delay: float = 0.0, *, urgent: bool = False) -> None:
        """Have the key looked at, `delay` seconds from now at the latest. `urgent`: also while it rests."""
        now = _now()
        if urgent:
            self._urgent.add(key)
        at = max(now + delay, self._held.get(key, (0.0, 0.0))[key in self._urgent])
        if at > now:
            self._add_at(key, at)
        elif key in self._taken:
            self._again.add(key)
        elif key not in self._queued:
            self._due.pop(key, None)
            self._queued.add(key)
            self._ready.push(self._group_of(key), key)
            self._wake()

    def retry(self, key: Key, at_least: float = 0.0) -> None:
        """Have the key looked at after its back-off, which doubles each time, and after `at_least` seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # The power of a key that fails for days would itself grow beyond all bounds.
        self.add(key, max(min(self._first_delay * 2 ** min(failures, 60), self._max_delay), at_least))

    def try_now(self, keys: Iterable[Key]) -> None:
        """Have keys looked at for which what was refused may be granted now: their back-offs begin anew."""
        for key in keys:
            self.forget(key)
            self.add(key)

    def failures(self, key: Key) -> int:
        """How often the key was retried since it was last forgotten."""
        return self._failures.get(key, 0)

    def forget(self, key: Key) -> None:
        """The key is well: its next back-off is the first again."""
        self._failures.pop(key, None)

    def drop(self, key: Key) -> None:
        """The key will not come again: nothing of it is remembered."""
        for memory in (self._failures, self._held, self._due):
            memory.pop(key, None)
        self._urgent.discard(key)

    def hold(self, key: Key, seconds: float, *, urgent_seconds: float | None = None) -> None:
        """The key, which the caller has, is not handed out in the next `seconds`.

        `urgent_seconds`: what is urgent waits for so long if the key was urgent this time, too, and else for nothing.
        None: as long as all else.
        """
        now = _now()
        urgent = seconds if urgent_seconds is None else urgent_seconds if key in self._hurried else 0.0
        self._held[key] = now + seconds, now + urgent

    async def get(self) -> Key:
        """The next key; the caller holds it until `done`."""
        while not self._ready.ready:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                # A wake-up that this caller was given and cannot use belongs to the next one.
                if waiter.done() and not waiter.cancelled():
                    self._wake()
                raise
        key = self._ready.pop()
        self._queued.discard(key)
        self._taken.add(key)
        if key in self._urgent:
            self._urgent.discard(key)
            self._hurried.add(key)
        return key

    def done(self, key: Key) -> None:
        """The caller no longer holds the key."""
        self._taken.discard(key)
        self._hurried.discard(key)
        self._ready.done(self._group_of(key))
        if self._held.get(key, (0.0, 0.0))[0] <= _now():
            self._held.pop(key, None)
        if key in self._again:
            self._again.discard(key)
            self.add(key)
        self._wake()

    def _add_at(self, key: Key, at: float) -> None:
        if key in self._queued or at >= self._due.get(key, float("inf")):
            return
        self._due[key] = at
        heapq.heappush(self._timers, (at, next(self._numbers), key))
        if len(self._timers) > 2 * len(self._due) + _STALE_ALARMS:
            self._timers = [entry for entry in self._timers if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._timers)
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None
        if self._timers:
            self._alarm = asyncio.get_running_loop().call_at(self._timers[0][0], self._ring)

    def _ring(self) -> None:
        now = _now()
        while self._timers and self._timers[0][0] <= now:
            at, _, key = heapq.heappop(self._timers)
            # An entry that a sooner one has overtaken is stale.
            if self._due.get(key) == at:
                del self._due[key]
                self.add(key)
        self._set_alarm()

    def _wake(self) -> None:
        while self._waiters and self._ready.ready:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


def _now() -> float:
    return asyncio.get_running_loop().time()
