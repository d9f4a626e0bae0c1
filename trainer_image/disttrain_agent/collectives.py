"""A rank that is asked for its last collective calls, through a pipe, takes them out of torch's flight recorder.

Before them it writes the stacks of its other threads. A thread of its own answers, also while the main one waits in a
call of torch; not while a call keeps Python from running.
"""

import os
import stat
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

from disttrain_agent.environment import collectives_file, collectives_pipe, threads_file
from disttrain_api.flight_recorder import MAX_BYTES, Collective, collectives_below, collectives_in, lines_of

MAX_THREADS_BYTES = 256 * 1024
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions of torch, each with the calls of other backends: gloo's, and NCCL's. A version may lack one."""


def answer_for_collectives(rank: int, folder: Path) -> None:
    """Have a thread wait for questions for as long as the process lives. Raises OSError."""
    path = collectives_pipe(folder, rank)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    os.mkfifo(part, 0o600)
    # For writing, too: else it would be at its end as soon as somebody has asked.
    pipe = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    threading.Thread(
        target=_answer,
        args=(pipe, collectives_file(folder, rank), threads_file(folder, rank)),
        name="asked-for-collectives",
        daemon=True,
    ).start()
    part.rename(path)


def ask_for_collectives(rank: int, folder: Path) -> bool:
    """Ask a rank; return whether it may answer."""
    with suppress(OSError):
        for file in (collectives_file, threads_file):
            file(folder, rank).unlink(missing_ok=True)
        pipe = os.open(collectives_pipe(folder, rank), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return stat.S_ISFIFO(os.fstat(pipe).st_mode) and os.write(pipe, b"\n") == 1
        finally:
            os.close(pipe)
    return False


def answered_collectives(rank: int, folder: Path) -> list[Collective] | None:
    """Return what a rank has answered; None where it has not yet."""
    found = _read(collectives_file(folder, rank), MAX_BYTES)
    return None if found is None else collectives_below(found)


def other_threads(rank: int, folder: Path) -> str:
    """Return the stacks of a rank's other threads, once it has answered for its collective calls; "" for none."""
    return _read(threads_file(folder, rank), MAX_THREADS_BYTES) or ""


def _read(path: Path, most: int) -> str | None:
    with suppress(OSError):
        # Whatever a rank puts there does not block the agent.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return os.read(file, most).decode(errors="replace")
        finally:
            os.close(file)
    return None


def recorded() -> list[Collective]:
    """Return the last calls of this process; none where torch does not record them."""
    # Not imported here: another thread may be about to.
    torch = sys.modules.get("torch._C._distributed_c10d")
    found: list[Collective] = []
    for dump in (getattr(torch, name, None) for name in _DUMPS):
        # One that fails does not take the calls of the other.
        with suppress(Exception):
            found += collectives_in(dump()) if dump is not None else []
    return found


def _answer(pipe: int, collectives: Path, threads: Path) -> None:
    while os.read(pipe, 4096):
        # Who sees the second file looks for the first one.
        for path, made in ((threads, _stacks_of_others), (collectives, lambda: lines_of(recorded()))):
            with suppress(Exception):
                part = path.with_name(f".{path.name}.part")
                part.write_text(made())
                part.replace(path)


def _stacks_of_others() -> str:
    """Return the stacks of all threads but the main one and this one, as faulthandler writes them."""
    left_out = {threading.main_thread().ident, threading.get_ident()}
    return "\n\n".join(
        f"Thread 0x{thread:016x} (most recent call first):\n"
        + "\n".join(
            f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}'
            for frame, line in traceback.walk_stack(top)
        )
        for thread, top in sys._current_frames().items()
        if thread not in left_out
    )[:MAX_THREADS_BYTES]
