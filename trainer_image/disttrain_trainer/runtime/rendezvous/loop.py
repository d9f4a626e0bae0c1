"""A thread that waits for sockets, and calls what is registered with each."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Loop:
    """Runs until the process ends, or `close` is called. Handlers are `data` of the selector's keys."""

    def __init__(self, name: str, tick: Callable[[float], float | None] = lambda now: None) -> None:
        """`tick`: called with the time before each wait. Returns the time by which it must be called again, or None."""
        self.selector = selectors.DefaultSelector()
        self._tick = tick
        self._calls: deque[Callable[[], None]] = deque()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self.selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._lock = threading.Lock()
        """Guards `_calls` against the loop's end: no call is added after the last one has run."""
        self._ending = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, work: Callable[[], None]) -> bool:
        """Have the loop's thread run `work` and return True; return False after the loop's end. For any thread."""
        with self._lock:
            if self._closed:
                return False
            self._calls.append(work)
            # Full means that it is awake.
            with suppress(BlockingIOError):
                self._wake.send(b"\0")
        return True

    def close(self) -> None:
        """End the thread and close its sockets, after it has run what `call` was given before."""
        self.call(self._end)
        self._thread.join()

    def _end(self) -> None:
        self._ending = True

    def _drain(self, events: int) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _run(self) -> None:
        try:
            while not self._ending:
                again = self._tick(time.monotonic())
                for key, events in self.selector.select(None if again is None else max(0.0, again - time.monotonic())):
                    key.data(events)
                self._do_what_is_left()
        finally:
            with self._lock:
                self._closed = True
            self._do_what_is_left()
            for key in list(self.selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self.selector.close()
            self._wake.close()

    def _do_what_is_left(self) -> None:
        while self._calls:
            self._calls.popleft()()
