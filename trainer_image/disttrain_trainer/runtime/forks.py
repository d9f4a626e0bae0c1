"""What makes a fork of a process that has imported torch as good as a program of its own."""

import contextlib
import gc
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from disttrain_trainer.runtime.leaving import leave


def run_module(module: str, arguments: Sequence[str]) -> int:
    """`python -P -m MODULE ARGUMENTS`."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def end_with(program: Callable[[], int]) -> None:
    """End this process as an interpreter that runs nothing else would."""
    code = 1
    # As it sets them when it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # What files of the processes that this one is a fork of hold back is theirs to write.
    gc.freeze()
    try:
        code = program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def close_from(first: int) -> None:
    """Close all descriptors from this one on. Their owners are in frames of the process that this one is a fork of, and
    none of those runs again here."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib would make paths of numbers
        if int(name) >= first:
            with contextlib.suppress(OSError):
                os.close(int(name))


def call_it(name: str) -> None:
    """Set the name that `ps` and `top` show."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:  # noqa: PTH123 - pathlib says no less
        file.write(name)
