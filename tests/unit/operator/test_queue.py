"""Keys: once in the queue, with one worker at a time, now or later."""

import asyncio
from collections.abc import Iterator

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
