"""An asyncio loop in a thread of its own: proxies and kubelets that live beside a test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.waiting import GENEROUS

Result = TypeVar("Result")


class InBackground:
    """Runs `main` in a thread of its own from `start` to `stop`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._begun = threading.Event()
        self._main: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    async def main(self) -> None:
        """What runs; it is cancelled at the end. It calls `begun` once it works."""
        raise NotImplementedError

    def begun(self) -> None:
        self._begun.set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._begun.wait(GENEROUS), f"{type(self).__name__} does not begin"
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.soon(lambda: self._main.cancel() if self._main is not None else None)
        self._thread.join(GENEROUS)
        assert not self._thread.is_alive(), f"{type(self).__name__} does not end"
        if self._error is not None and error is None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Something that was begun in the background went wrong: said at the end."""
        self._error = self._error or error

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine that runs in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(GENEROUS)

    def soon(self, act: Callable[[], object]) -> None:
        """Have something done in the loop."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(act)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._main = self.loop.create_task(self.main())
        try:
            self.loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._begun.set()
            for task in (left := asyncio.all_tasks(self.loop)):
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
