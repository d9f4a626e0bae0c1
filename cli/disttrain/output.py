"""Output of a command for a person: sentences on standard error (`print_stderr`), results on standard output (`show`).

A terminal, the reader of a pipe or a disk may go or pause at any moment, and nothing else that the command does may
depend on it. So a sentence that cannot be written is lost, and writing one never waits. What others have written is
text wherever it goes: whatever else is in it is escaped here, but for colours of our own.
"""

import contextlib
import io
import os
import select
import sys
import threading
from collections import deque
from typing import Any, TextIO

from disttrain.errors import CommandError
from disttrain.terminal import Painted
from disttrain_api.escape import escaped

_KEPT_WRITES = 1000
"""How many writes are kept for a reader that pauses: newer ones replace the oldest."""


class OutputError(CommandError):
    """Standard output does not take what the command was asked for."""


class Outlet(io.TextIOBase):
    """A text stream to a descriptor that never fails and never lets its writer wait: a thread does the writing."""

    def __init__(self, descriptor: int, encoding: str) -> None:
        self._descriptor, self._encoding = descriptor, encoding
        self._waiting: deque[str] = deque(maxlen=_KEPT_WRITES)
        self._changed = threading.Condition()
        self._busy = False
        self._thread: threading.Thread | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            with self._changed:
                self._waiting.append(text)
                self._changed.notify_all()
                self._start()
        return len(text)

    def drain(self) -> None:
        """Wait until all texts so far are written or lost."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def _start(self) -> None:
        """Start the thread, once: texts of two would change places. Called with the lock held."""
        if self._thread is None:
            # A daemon: a reader that pauses for ever does not keep the process.
            self._thread = threading.Thread(target=self._work, name="output", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                text, self._busy = self._waiting.popleft(), True
            with contextlib.suppress(OSError):
                _write_all(self._descriptor, text, self._encoding)


def print_stderr(text: str) -> None:
    """Write a sentence for the person to standard error, if that takes any."""
    standard_error().write(f"{escaped(text, lines=True)}\n")


def show(text: str) -> None:
    """Write what the command was asked for to standard output, after all sentences so far. Raises OutputError."""
    drain()
    shown = text if isinstance(text, Painted) else escaped(text, lines=True)
    try:
        _write_all(1, f"{shown}\n", _encoding(sys.stdout))
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def ask(question: str) -> bool | None:
    """Ask for a yes on the terminal; None without a terminal."""
    if not (standard_error().isatty() and _reads_terminal()):
        return None
    standard_error().write(f"{escaped(question)} [y/N] ")
    drain()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def prompt(question: str) -> str | None:
    """Ask for a line on the terminal; None without a terminal, or at the end of input."""
    if not (standard_error().isatty() and _reads_terminal()):
        return None
    standard_error().write(f"{escaped(question)} ")
    drain()
    line = sys.stdin.readline()
    return line.strip() if line else None


def _reads_terminal() -> bool:
    """Whether standard input is a terminal, and this process in its foreground, where reading does not stop it."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def standard_error() -> Outlet:
    """Return the stream behind `print_stderr`."""
    global _standard_error
    if _standard_error is None:
        _standard_error = Outlet(2, _encoding(sys.stderr))
    return _standard_error


def drain() -> None:
    """Wait until all sentences so far are written or lost; Ctrl-C ends the wait."""
    if _standard_error is not None:
        with contextlib.suppress(KeyboardInterrupt):
            _standard_error.drain()


_standard_error: Outlet | None = None
"""One for the process, as standard error is."""


def open_closed_streams() -> None:
    """Lead standard streams that were closed (`2>&-`) to /dev/null: else the next file that is opened has their number,
    and takes what is meant for them."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest number that is free.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


def _encoding(stream: TextIO | Any) -> str:
    return str(getattr(stream, "encoding", None) or "utf-8")


def _write_all(descriptor: int, text: str, encoding: str) -> None:
    """Raises OSError where it cannot be written."""
    left = memoryview(text.encode(encoding, "backslashreplace"))
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
