"""What a process and those below it have done so far, as the kernel counts: Linux alone."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_PARENT, _TIMES = 1, slice(11, 15)
"""Fields of a process's `stat` after its name: own time in user and in system mode, and that of children that ended."""
_COUNTED = ("rchar", "wchar", "read_bytes", "write_bytes")
_GPU = "/dev/nvidia"
_LIST_SECONDS = 2.0


class Work(NamedTuple):
    """Done by a process, and by those below it."""

    own_seconds: float
    """Time of a processor."""
    others_seconds: float
    """The same, of the processes below it."""
    bytes: int
    """Read and written, by all of them."""
    has_gpu: bool
    """Whether the process has opened a GPU."""

    def exceeds(self, former: "Work", most_bytes: float, most_seconds: float, *, own_seconds: bool) -> bool:
        """Return whether more was done since. A process that has ended is counted no more: less is a change, too.

        own_seconds: whether the process's own time counts though it has a GPU.
        """
        changes = [self.others_seconds - former.others_seconds, self.bytes - former.bytes]
        seconds = changes[0]
        if own_seconds or not self.has_gpu:
            seconds += self.own_seconds - former.own_seconds
        return min(changes) < 0 or seconds >= most_seconds or changes[1] >= most_bytes


class Works:
    """What processes have done. All are listed at most once in a few seconds, for all ranks of a pod together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._listed = clock, -math.inf
        self._seconds: dict[int, float] = {}
        """Time of a processor, by process."""
        self._below: dict[int, list[int]] = {}

    def of(self, pid: int) -> Work | None:
        """Return what a process has done; None where that cannot be known."""
        if self._clock() - self._listed >= _LIST_SECONDS:
            self._list()
        own = _bytes_of(pid)
        if own is None or pid not in self._seconds:
            return None
        found, left = {pid}, [pid]
        while left:
            news = set(self._below.get(left.pop(), ())) - found
            found |= news
            left += news
        # The agent of a program is below its first rank.
        others = found - {pid, os.getpid()}
        counted = [own, *(_bytes_of(one) or 0 for one in others)]
        return Work(self._seconds[pid], sum(self._seconds[one] for one in others), sum(counted), _has_gpu(pid))

    def _list(self) -> None:
        self._listed, self._seconds, self._below = self._clock(), {}, {}
        for one, parent, ticks in _processes():
            self._below.setdefault(parent, []).append(one)
            self._seconds[one] = ticks / os.sysconf("SC_CLK_TCK")


def _processes() -> Iterator[tuple[int, int, int]]:
    """Each process, its parent, and its time of a processor in ticks."""
    with contextlib.suppress(OSError):
        for path in _PROC.iterdir():
            if not path.name.isdecimal():
                continue
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The name before it may hold anything, also parentheses.
                fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield int(path.name), int(fields[_PARENT]), sum(map(int, fields[_TIMES]))


def _bytes_of(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        lines = (_PROC / str(pid) / "io").read_text().splitlines()
        return sum(int(number) for name, _, number in (line.partition(": ") for line in lines) if name in _COUNTED)
    return None


def _has_gpu(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for path in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(path.readlink()).startswith(_GPU):
                    return True
    return False
