"""The cgroups below which the pods of our nodes live: made, emptied by force, removed. Knows both hierarchies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.cluster.processes import ProcessId

ROOT = "/disttrain-test-cluster"
_MOUNT = Path("/sys/fs/cgroup")


def hierarchies() -> Sequence[Path]:
    """One folder with cgroup v2; one for each controller with v1 (some of them links to another)."""
    if (_MOUNT / "cgroup.controllers").exists():
        return [_MOUNT]
    return [path for path in sorted(_MOUNT.iterdir()) if path.is_dir() and not path.is_symlink()]


def make(cgroup: str) -> None:
    for hierarchy in hierarchies():
        folder = hierarchy
        for part in cgroup.strip("/").split("/"):
            if hierarchy == _MOUNT:
                _pass_controllers_on(folder)
            parent, folder = folder, folder / part
            folder.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                if hierarchy != _MOUNT and (folder / setting).exists():
                    # With v1 a new cpuset has no processor at all, and nothing can run in it.
                    (folder / setting).write_text((parent / setting).read_text())


def _pass_controllers_on(folder: Path) -> None:
    for controller in (folder / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")


def processes(cgroup: str) -> Iterator[ProcessId]:
    pids = {pid for folder in _folders(cgroup) for pid in _read_pids(folder)}
    for pid in sorted(pids):
        if process := ProcessId.of(pid):
            yield process


def kill(cgroup: str) -> None:
    """Until nothing is left: a process may fork while it is being looked for."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = list(processes(cgroup))
        if not found:
            return
        for process in found:
            process.end(grace=0)


def remove(cgroup: str) -> None:
    for folder in sorted(_folders(cgroup), key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()


def remains(cgroup: str) -> Sequence[Path]:
    return [hierarchy / cgroup.strip("/") for hierarchy in hierarchies() if (hierarchy / cgroup.strip("/")).exists()]


def _folders(cgroup: str) -> Iterator[Path]:
    for top in remains(cgroup):
        yield top
        yield from (path for path in top.rglob("*") if path.is_dir())


def _read_pids(folder: Path) -> Sequence[int]:
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []
