"""An event loop for tests of what happens when: its time passes when the test says so."""

import asyncio
from collections.abc import Callable
from typing import Any


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still between calls of `pass_time`."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        """Let timers that are due within so many seconds go off."""
        self.now += seconds
        self.run_until_complete(_turn())

    def call(self, what: Callable[..., object], *arguments: Any) -> None:
        """Call the function within the loop, and let follow what follows at once."""
        self.run_until_complete(_call(what, *arguments))


async def _call(what: Callable[..., object], *arguments: Any) -> None:
    what(*arguments)
    await _turn()


async def _turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)
