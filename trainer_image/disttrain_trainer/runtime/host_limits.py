"""Limits of the machine or of the container of this process: memory, cores, processes. Standard library only."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from disttrain_agent.control_groups import control_groups

# Kernels write "no limit" as a number of this size, too.
_NO_LIMIT = 2**60


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that this process and its neighbours in the container can ever have together, swap included; None where the
    system does not tell. root: of a file system that shows /proc and /sys.
    """
    known = _meminfo(root)
    total = known.get("MemTotal") or _pages()
    swap = known.get("SwapTotal", 0)
    limits = [size for size in (total, *_limits(root)) if size is not None]
    return min(limits) + swap if limits else None


def memory_available(root: Path = Path("/")) -> int | None:
    """Bytes of memory that can be had now without swapping; None where the system does not tell."""
    found = [size for size in (_meminfo(root).get("MemAvailable"), *_left(root)) if size is not None]
    return max(0, min(found)) if found else None


def tasks_left(root: Path = Path("/")) -> int | None:
    """Processes and threads that may still be started before a limit of the kernel or the container is met; None where
    the system does not tell.
    """
    found = []
    kernel = root / "proc/sys/kernel"
    limits = [limit for name in ("threads-max", "pid_max") if (limit := _number(kernel / name)) is not None]
    if limits:
        found.append(min(limits) - _tasks(root))
    for folder in control_groups(root, "pids"):
        most, used = _number(folder / "pids.max"), _number(folder / "pids.current")
        if most is not None and used is not None:
            found.append(most - used)
    return max(0, min(found)) if found else None


def cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use: those that it may run on, or fewer where its container's CPU limit is
    less. Part of a core counts as a core.

    Threads beyond the limit do not only wait: those of OpenMP spin until the others are done, which the limit pays for.
    """
    shares = [share for folder in control_groups(root, "cpu") if (share := _cpu_limit(folder)) is not None]
    # Only Linux tells on which ones a process may run.
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([own, *map(math.ceil, shares)]))


def _cpu_limit(folder: Path) -> float | None:
    """Return the cores' worth of time that a control group gets; None where it has no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota, period = str(_number(folder / "cpu.cfs_quota_us")), str(_number(folder / "cpu.cfs_period_us"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _tasks(root: Path) -> int:
    """Processes and threads of the machine: "… running/all …"."""
    try:
        return int((root / "proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, IndexError, ValueError):
        return 0


def _meminfo(root: Path) -> dict[str, int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split() for line in lines]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in parts if len(words) == 3 and words[1].isdigit()}


def _pages() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _limits(root: Path) -> Iterator[int | None]:
    for folder in control_groups(root, "memory"):
        yield _number(folder / "memory.max")
        yield _number(folder / "memory.limit_in_bytes")


def _left(root: Path) -> Iterator[int | None]:
    for folder in control_groups(root, "memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None:
                yield most - (used - _cache(folder))


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _cache(folder: Path) -> int:
    """Bytes of files that the group has in memory, and gives up when it needs room."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split()[:2] for line in lines if len(line.split()) == 2)
    return sum(int(found.get(name, 0)) for name in ("inactive_file", "active_file"))
