"""A process that ends with its parent."""

import ctypes
import functools
import os
import signal
import sys
from collections.abc import Callable

ON_LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> Callable[[], None] | None:
    """First action of a child of `parent`: ask to be killed when the parent dies.

    In a container the kernel does this for the children of PID 1; as a process of a laptop they would live on.
    """
    if not ON_LINUX:
        return None
    prctl = libc().prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library."""
    return ctypes.CDLL(None, use_errno=True)
