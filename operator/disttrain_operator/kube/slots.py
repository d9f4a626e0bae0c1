"""How many requests are in flight; namespaces take turns for the slots, so that thousands of one delay no other's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from disttrain_operator.fair_queue import FairQueue


class Slots:
    """So many at a time."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def of(self, group: str) -> AsyncIterator[None]:
        """One slot, for the length of the block."""
        await self._acquire(group)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, group: str) -> None:
        # While anybody waits no slot is free: it goes from hand to hand.
        if self._free:
            self._free -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(group, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting.ready:
            waiter = self._waiting.pop()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1


def namespace_of(path: str) -> str:
    """The namespace that a path leads into; empty for those of the whole cluster."""
    return path.partition("/namespaces/")[2].partition("/")[0]
