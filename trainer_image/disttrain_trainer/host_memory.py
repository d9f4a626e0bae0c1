"""How much memory this machine, or the container that this process is in, has. Standard library only."""

import os
from collections.abc import Iterator
from pathlib import Path

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
    for folder, limit, _ in _groups(root):
        yield _number(folder / limit)


def _left(root: Path) -> Iterator[int | None]:
    for folder, limit, usage in _groups(root):
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None:
            yield most - (used - _cache(folder))


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """The control groups of this process from its own to the root: folder, name of the limit, name of the usage."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a container the path may be the host's, and what is mounted is the container's own group.
        below = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(below), -1, -1):
            yield top.joinpath(*below[:depth]), *names


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
