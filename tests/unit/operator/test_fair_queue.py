"""The queue by chance: namespaces take turns, no key is lost, one worker at a time, and none before its time."""

import asyncio
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disttrain_operator.queue import WorkQueue
from tests.soak import SOAK
from tests.suites import examples
from tests.unit.operator.clocked_loop import ClockedLoop

Key = tuple[str, int]

LIMIT = 2
FOR_EVER = 10_000.0


class QueueMachine(RuleBasedStateMachine):
    """Workers take keys and give them back; anybody adds keys, now or later."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = ClockedLoop()
        self.queue = WorkQueue[Key](group_of=lambda key: key[0], limit=lambda group: LIMIT)
        self.taken: list[Key] = []
        self.owed: set[Key] = set()
        """Keys that were added and have not been handed out since."""
        self.not_before: dict[Key, float] = {}
        self.ready: list[Key] = []
        """Keys that can be handed out now, as far as their own namespace goes, in the order in which they became so."""
        self.served_since: dict[str, Counter[str]] = {}
        """For each namespace that waits: how often the others were served meanwhile."""

    def teardown(self) -> None:
        while self.taken:
            self.give_back(0)
        for _ in range(20):
            self.loop.pass_time(FOR_EVER)
            self.note_who_waits()
            while self.queue.ready:
                self.take()
                self.give_back(0)
                self.note_who_waits()
        assert not self.owed, "a key was lost"
        self.loop.close()

    keys = st.tuples(st.sampled_from("abc"), st.integers(0, 2))

    @rule(key=keys)
    def add(self, key: Key) -> None:
        self.loop.call(self.queue.add, key)
        self.owed.add(key)

    @rule(key=keys, delay=st.sampled_from([0.5, 1.0, 5.0]))
    def add_later(self, key: Key, delay: float) -> None:
        self.loop.call(self.queue.add, key, delay)
        self.owed.add(key)

    @rule(key=keys, at_least=st.sampled_from([0.0, 7.0]))
    def retry(self, key: Key, at_least: float) -> None:
        self.loop.call(self.queue.retry, key, at_least)
        self.owed.add(key)

    @rule(key=keys)
    def forget(self, key: Key) -> None:
        self.queue.forget(key)
        assert self.queue.failures(key) == 0

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 5), seconds=st.sampled_from([1.0, 3.0]))
    def hold(self, which: int, seconds: float) -> None:
        """As a worker does with the key that it has."""
        key = self.taken[which % len(self.taken)]
        self.loop.call(self.queue.hold, key, seconds)
        self.not_before[key] = self.loop.now + seconds

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.pass_time(seconds)

    @precondition(lambda self: self.queue.ready)
    @rule()
    def take(self) -> None:
        key = self.loop.run_until_complete(self.queue.get())
        namespace = key[0]
        assert key not in self.taken, "two workers have it"
        assert self.loop.now >= self.not_before.get(key, 0.0), "it was held back"
        assert key in self.owed
        assert key == next(entry for entry in self.ready if entry[0] == namespace), "the first of its namespace"
        assert Counter(name for name, _ in self.taken)[namespace] < LIMIT
        for waiting, served in self.served_since.items():
            if waiting != namespace:
                served[namespace] += 1
                assert served[namespace] < 2, f"{namespace} was served twice while {waiting} waited"
        self.served_since.pop(namespace, None)
        self.ready.remove(key)
        self.owed.discard(key)
        self.taken.append(key)
        self.note_who_waits()

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 5))
    def give_back(self, which: int) -> None:
        key = self.taken.pop(which % len(self.taken))
        self.loop.call(self.queue.done, key)

    @invariant()
    def note_who_waits(self) -> None:
        """Who became ready, asked of the queue's own view: what it then does with them is what is held to account."""
        now = list(self.queue)
        self.ready = [key for key in self.ready if key in now] + [key for key in now if key not in self.ready]
        assert len(now) == len(set(now)) == len(self.queue), "each key waits once"
        out = Counter(name for name, _ in self.taken)
        may_be_served = {name for name, _ in now if out[name] < LIMIT}
        assert bool(may_be_served) == self.queue.ready
        for name in list(self.served_since):
            if name not in may_be_served:
                del self.served_since[name]
        for name in may_be_served:
            self.served_since.setdefault(name, Counter())


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=2000 if SOAK else examples(150), stateful_step_count=60, deadline=None)


async def test_a_namespace_with_little_to_do_does_not_wait_for_one_with_much() -> None:
    """Red where all keys stand in one line."""
    queue = WorkQueue[Key](group_of=lambda key: key[0])
    for number in range(10_000):
        queue.add(("crowded", number))
    await queue.get()
    queue.add(("quiet", 0))
    assert [await queue.get(), await queue.get()] == [("crowded", 1), ("quiet", 0)]


async def test_one_namespace_never_has_all_workers() -> None:
    """Red without the limit of a group."""
    queue = WorkQueue[Key](group_of=lambda key: key[0], limit=lambda group: 2)
    for number in range(5):
        queue.add(("crowded", number))
    taken = [await queue.get(), await queue.get()]
    assert not queue.ready
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add(("quiet", 0))
    assert await worker == ("quiet", 0)
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.done(taken[0])
    assert await worker == ("crowded", 2)


async def test_a_namespace_whose_share_shrinks_gets_no_more_until_it_has_less() -> None:
    share = 3
    queue = WorkQueue[Key](group_of=lambda key: key[0], limit=lambda group: share)
    for number in range(9):
        queue.add(("crowded", number))
    taken = [await queue.get() for _ in range(3)]
    share = 1
    for key in taken[:2]:
        queue.done(key)
        assert not queue.ready
    queue.done(taken[2])
    assert await queue.get() == ("crowded", 3)
    assert not queue.ready
    share = 3
    queue.done(("crowded", 3))
    assert [await queue.get() for _ in range(3)] == [("crowded", 4), ("crowded", 5), ("crowded", 6)]
    assert not queue.ready


async def test_what_was_due_and_is_not_any_more_is_not_kept() -> None:
    """A job that is looked at a thousand times, each time with a later alarm, leaves one of them."""
    queue = WorkQueue[Key](group_of=lambda key: key[0])
    for _ in range(1000):
        queue.add(("a", 0), 3600)
        queue.add(("a", 0))
        queue.done(await queue.get())
    assert len(queue._timers) < 100
