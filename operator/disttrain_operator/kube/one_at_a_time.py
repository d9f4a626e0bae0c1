"""Large texts are read in a thread, one of all in the process at a time: so is their memory bounded, and the loop goes
on meanwhile."""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

Result = TypeVar("Result")

PAGES_AT_A_TIME = 4
"""Pages of lists that are asked for, or wait to be read, at a time. Each may have 4 MiB."""

_LOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
_PAGES: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def in_thread(work: Callable[[], Result]) -> Result:
    """Return what `work` returns, when it is its turn. Who comes first is first."""
    lock = _LOCKS.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with lock:
        return await asyncio.to_thread(work)


def place_for_a_page() -> asyncio.Semaphore:
    """Return the semaphore that bounds how many pages' texts are held at a time."""
    return _PAGES.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(PAGES_AT_A_TIME))
