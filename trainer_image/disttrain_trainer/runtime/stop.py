"""SIGTERM: a wish to stop that ranks agree on between two steps. A second one: no rank waits for the others any more.

Python runs a signal handler only between two byte codes of the main thread, which may sit in a collective for minutes
when a peer is gone. The interpreter's wake-up descriptor is written at once; a thread of ours reads the signal there.
Imports nothing but the standard library: it is installed before torch, whose import takes seconds.
"""

import os
import signal
import socket
import sys
import threading
import time

# What the end of a rank needs after the last chance for a checkpoint has passed.
_MARGIN_SECONDS = 3.0


class StopRequest:
    """Whether SIGTERM has come. Before `loop_started()` the signal ends the process at once with 143."""

    EXIT_CODE = 143

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._looping = False
        self._grace_seconds: float | None = None
        self._code: int | None = None
        self._wakeup: socket.socket | None = None
        self.before_exit = lambda message: None
        """Called with a sentence when this thread, not the loop, ends the process."""
        self.end_waits = lambda: None
        """Called when SIGTERM has come again."""

    @classmethod
    def on_sigterm(cls) -> "StopRequest":
        """Install the handler. Main thread only."""
        stop = cls()
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        stop._wakeup = writer
        signal.signal(signal.SIGTERM, _heard)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=stop._listen, args=(reader,), name="sigterm", daemon=True).start()
        return stop

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def request(self) -> None:
        self._requested.set()

    def loop_started(self, grace_seconds: float | None) -> None:
        """From now on the loop obeys; should it not end within the grace, the process still exits with 143 in time."""
        self._grace_seconds = grace_seconds
        self._looping = True
        if self._wakeup is not None and threading.current_thread() is threading.main_thread():
            self._listen_again(self._wakeup.fileno())

    def _listen_again(self, wakeup: int) -> None:
        """Put back what a user's code has changed since, and say so; a handler in Python does no harm."""
        replaced = []
        if not callable(signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, _heard)
            replaced.append("its handler")
        if signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False) != wakeup:
            replaced.append("Python's wake-up descriptor")
        if replaced:
            sentence = (
                f"SIGTERM: {' and '.join(replaced)} had been replaced and is put back: a stop leaves a checkpoint"
            )
            print(f"disttrain: {sentence}", file=sys.stderr, flush=True)

    def work_ended(self, code: int) -> None:
        """The process ends with `code` by itself: where it has no time left for that, it has nothing more to say."""
        self._code = code

    def _listen(self, reader: socket.socket) -> None:
        _hears_sigterm(reader, None)
        if not self._looping:
            self._exit("SIGTERM came before the first step")
        self.request()
        grace = self._grace_seconds
        until = None if grace is None else time.monotonic() + max(0.0, grace - _MARGIN_SECONDS)
        while _hears_sigterm(reader, until):
            self.end_waits()
        self._exit(f"the step that SIGTERM met did not end within the grace of {grace:g} s")

    def _exit(self, message: str) -> None:
        if self._code is not None:
            os._exit(self._code)
        # A report or a log that cannot be written any more must not keep the process.
        try:
            self.before_exit(message)
        finally:
            try:
                print(f"disttrain: Stopped: {message}", file=sys.stderr, flush=True)
            finally:
                os._exit(self.EXIT_CODE)


def _hears_sigterm(reader: socket.socket, until: float | None) -> bool:
    """Wait for the signal until a time (None: for ever); whether it came."""
    while True:
        reader.settimeout(None if until is None else max(0.001, until - time.monotonic()))
        try:
            if signal.SIGTERM in reader.recv(64):
                return True
        except TimeoutError:
            return False


def _heard(*_: object) -> None:
    """The thread that reads the wake-up descriptor does what is to be done."""
