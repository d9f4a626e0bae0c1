"""Keys: once in the queue, with one worker at a time, now or later."""

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest

from disttrain_operator.queue import WorkQueue
from tests.unit.operator.clocked_loop import ClockedLoop
from tests.waiting import GENEROUS


@pytest.fixture
def loop() -> Iterator[ClockedLoop]:
    loop = ClockedLoop()
    yield loop
    loop.close()


async def drain(queue: WorkQueue[str]) -> list[str]:
    """All keys that are ready now."""
    keys = []
    while len(queue):
        keys.append(await queue.get())
    return keys


def test_the_earliest_of_several_delays_counts(loop: ClockedLoop) -> None:
    queue = WorkQueue[str]()
    for key, delay in (("late", 3600), ("late", 2), ("late", 1800), ("other", 1)):
        loop.call(queue.add, key, delay)
    loop.pass_time(1)
    assert list(queue) == ["other"]
    loop.pass_time(1)
    assert list(queue) == ["other", "late"]


def test_now_overtakes_later_and_later_does_not_come_on_top(loop: ClockedLoop) -> None:
    queue = WorkQueue[str]()
    loop.call(queue.add, "a", 1)
    loop.call(queue.add, "a")
    assert loop.run_until_complete(queue.get()) == "a"
    loop.call(queue.done, "a")
    loop.pass_time(5)
    assert len(queue) == 0


def test_back_off_doubles_until_forgotten(loop: ClockedLoop) -> None:
    queue = WorkQueue[str](first_delay=1, max_delay=4)
    for delay in (1, 2, 4, 4, 4):
        loop.call(queue.retry, "a")
        loop.pass_time(delay - 0.5)
        assert not queue.ready
        loop.pass_time(0.5)
        assert loop.run_until_complete(queue.get()) == "a"
        loop.call(queue.done, "a")
    assert queue.failures("a") == 5
    queue.forget("a")
    assert queue.failures("a") == 0


async def test_a_change_overtakes_the_back_off() -> None:
    queue = WorkQueue[str](first_delay=3600, max_delay=3600)
    queue.retry("a")
    assert len(queue) == 0
    queue.add("a")
    assert await drain(queue) == ["a"]


async def test_workers_that_wait_get_one_key_each() -> None:
    queue = WorkQueue[str]()
    workers = [asyncio.create_task(queue.get()) for _ in range(3)]
    await asyncio.sleep(0)
    for key in ("a", "b", "c"):
        queue.add(key)
    assert sorted(await asyncio.gather(*workers)) == ["a", "b", "c"]


async def test_a_cancelled_worker_takes_no_wake_up_with_it() -> None:
    queue = WorkQueue[str]()
    first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    first.cancel()
    assert await asyncio.wait_for(second, GENEROUS) == "a"


def take(loop: ClockedLoop, queue: WorkQueue[str], *, rests: float, urgent: float) -> None:
    """Work on the key that is ready, after which it rests."""

    async def work() -> None:
        key = await queue.get()
        queue.hold(key, rests, urgent_seconds=urgent)
        queue.done(key)

    assert queue.ready
    loop.run_until_complete(work())


def test_what_is_urgent_comes_while_a_key_rests(loop: ClockedLoop) -> None:
    queue = WorkQueue[str]()
    loop.call(queue.add, "a")
    take(loop, queue, rests=9, urgent=4)
    loop.call(queue.add, "a")
    loop.pass_time(1)
    assert not queue.ready
    loop.call(partial(queue.add, "a", urgent=True))
    take(loop, queue, rests=9, urgent=4)
    loop.pass_time(20)
    assert not queue.ready, "it was looked at after all that was added"


def test_what_is_urgent_again_waits_for_a_rest_of_its_own(loop: ClockedLoop) -> None:
    """Red where each of thousands of ends has the key looked at."""
    queue = WorkQueue[str]()
    loop.call(queue.add, "a")
    take(loop, queue, rests=9, urgent=4)
    for _ in range(3):
        loop.call(partial(queue.add, "a", urgent=True))
        take(loop, queue, rests=9, urgent=4)
        # Whatever else is added meanwhile, before or after.
        loop.call(queue.add, "a", 3)
        loop.call(partial(queue.add, "a", urgent=True))
        loop.call(queue.add, "a")
        loop.pass_time(3.5)
        assert not queue.ready
        loop.pass_time(0.5)
        take(loop, queue, rests=9, urgent=4)
        loop.call(queue.add, "a")
        loop.pass_time(8.5)
        assert not queue.ready
        loop.pass_time(0.5)
        take(loop, queue, rests=9, urgent=4)


@pytest.mark.parametrize("rests", [4, 9])
def test_a_stream_of_urgent_news_has_a_key_looked_at_once_in_each_rest(loop: ClockedLoop, rests: float) -> None:
    """Red where what is urgent after the usual rest does not count as urgent."""
    queue, taken = WorkQueue[str](), 0
    for _ in range(40):
        loop.call(partial(queue.add, "a", urgent=True))
        if queue.ready:
            take(loop, queue, rests=rests, urgent=4)
            taken += 1
        loop.pass_time(1)
    assert taken == 10


def test_what_is_urgent_while_a_worker_has_the_key_comes_next(loop: ClockedLoop) -> None:
    queue = WorkQueue[str]()

    async def work() -> None:
        key = await queue.get()
        queue.add(key, urgent=True)
        queue.hold(key, 9, urgent_seconds=4)
        queue.add(key, urgent=True)
        queue.done(key)

    loop.call(queue.add, "a")
    loop.run_until_complete(work())
    take(loop, queue, rests=9, urgent=4)


def test_nothing_is_urgent_enough_for_a_key_that_is_left_alone(loop: ClockedLoop) -> None:
    queue = WorkQueue[str]()

    async def work() -> None:
        key = await queue.get()
        queue.hold(key, 5)
        queue.done(key)

    loop.call(queue.add, "a")
    loop.run_until_complete(work())
    loop.call(partial(queue.add, "a", urgent=True))
    loop.pass_time(4.5)
    assert not queue.ready
    loop.pass_time(0.5)
    assert queue.ready
