"""How a process that ran code of a user ends: as Python ends, but in time, and without the tear-down of what is native.

Threads of torch and gloo can abort a process that has done all its work, or never end. Python's own part of an end
(threads that are waited for, exit handlers, files that are flushed) is what users' loggers, pools and files need.
Imports nothing but the standard library.
"""

import atexit
import gc
import io
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

SECONDS = 10.0
"""What all of it may take; less than an agent leaves to a rank that is done."""

_FILE = io.IOBase.__bases__[0]
"""The class of all files, C's and Python's, without the machinery of abstract classes."""


def leave(code: int, seconds: float = SECONDS) -> NoReturn:
    """End the process with `code`, once Python's part of an end is done or has taken so many seconds. Main thread only.

    Files that were open when gc.freeze() was last called are those of a parent or of the trainer, and left alone.
    """
    threading.Thread(target=_give_up, args=(code, seconds), name="leaving", daemon=True).start()
    # As in children of multiprocessing, which end without an end of the interpreter, too.
    for part in (threading._shutdown, atexit._run_exitfuncs, _flush):  # type: ignore[attr-defined]
        # An exit handler that raises has been printed; a Ctrl-C ends one part.
        with suppress(BaseException):
            part()
    os._exit(code)


def _give_up(code: int, seconds: float) -> None:
    threading.Event().wait(seconds)
    try:
        os.write(2, f"disttrain: threads, exit handlers or files did not end within {seconds:g} s\n".encode())
    finally:
        os._exit(code)


def _flush() -> None:
    """Write what open files hold back, as the interpreter does when it frees them."""
    files = [value for value in gc.get_objects() if issubclass(type(value), _FILE)]
    lost = set()
    for file in sorted(files, key=_depth):
        try:
            _write_out(file)
        except OSError as error:
            lost.add(f"disttrain: {getattr(file, 'name', file)!r} is not whole: {error.strerror}")
        except Exception:
            # Closed meanwhile, or a file but in name.
            continue
    for sentence in sorted(lost):
        print(sentence, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _write_out(file: io.IOBase) -> None:
    if _depth(file) != _WRAPPER:
        if not file.closed:
            file.flush()
    # A compressed file has an end of its own, which closing it writes.
    elif isinstance(file, io.BufferedIOBase) and file.writable():
        file.close()


_TEXT, _WRAPPER, _BYTES = range(3)


def _depth(file: io.IOBase) -> int:
    """Text goes through files that are written in Python, and these into C's."""
    if isinstance(file, io.TextIOWrapper):
        return _TEXT
    return _BYTES if type(file).__module__ == "_io" else _WRAPPER
