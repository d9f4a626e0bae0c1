"""How late the event loop is: everything in this process is as late."""

import asyncio
import time

TICK_SECONDS = 0.25


class LoopLag:
    """Ticks in the loop, and measures by how much each tick is late."""

    def __init__(self) -> None:
        self.worst = 0.0
        """The worst lag of the last minute, in seconds."""
        self._ticks: list[tuple[float, float]] = []
        self.ticked_at = time.monotonic()

    async def run(self) -> None:
        """Never returns."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            self.ticked_at = time.monotonic()
            self._note(self.ticked_at, max(0.0, self.ticked_at - before - TICK_SECONDS))

    def _note(self, now: float, lag: float) -> None:
        # Only lags that no later one exceeds can become the worst.
        while self._ticks and self._ticks[-1][1] <= lag:
            self._ticks.pop()
        self._ticks.append((now, lag))
        while self._ticks[0][0] < now - 60:
            self._ticks.pop(0)
        self.worst = self._ticks[0][1]
