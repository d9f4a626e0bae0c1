"""A call in a process of its own that may have so much more memory and time of a processor: what costs more ends it."""

import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.unit.trainer.worlds import _forkserver

MIB = 2**20
MEMORY = 256 * MIB
"""Beyond what the process has before the call."""
SECONDS = 30
"""A processor's time."""


def outcome(function: Callable[..., Any], *arguments: Any, memory: int = MEMORY) -> str:
    """Return `Kind: message` of what the call raises, `returned` or, where a limit ended the process, `ended by` what.

    All that is given must be picklable.
    """
    context = _forkserver()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(there, memory, function, arguments), daemon=True)
    process.start()
    there.close()
    try:
        found: str = here.recv()
    except EOFError:
        process.join()
        assert process.exitcode is not None
        found = f"ended by {signal.Signals(-process.exitcode).name}" if process.exitcode < 0 else "ended"
    process.join()
    return found


def _run(answer: Connection, memory: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        function(*arguments)
        message = "returned"
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
    answer.send(message)
