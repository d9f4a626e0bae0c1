"""Event loops for tests of what happens when: their time passes when the test says so, or as fast as it can."""

import asyncio
import selectors
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


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for no timer: its time jumps to when the next one is due."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    @property
    def now(self) -> float:
        return self._jumps.now

    def time(self) -> float:
        return self.now


class _Jumps(selectors.SelectSelector):
    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(timeout and 0.0)
