"""What is left of a cluster on the machine, and its removal. Finds it by looking, not by remembering: so it also works
after an `up` that was killed half-way."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tools.cluster import cgroups, mounts, network
from tools.cluster.nodes import NODES
from tools.cluster.paths import state_folder
from tools.cluster.processes import ProcessId, marked

_LINKS = [name for node in NODES for name in (node.link, node.bridge)]
_SHIM_SOCKETS = Path("/run/containerd/s")
_CONTAINER_LOGS = Path("/var/log/containers")
_CNI_RESULTS = Path("/var/lib/cni/results")
_DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
_SHARED_FOLDERS = tuple(
    folder
    for inner in (_SHIM_SOCKETS, _CONTAINER_LOGS, _CNI_RESULTS, _DEVICE_PLUGINS)
    for folder in ((inner,) if inner.parent == Path("/var/log") else (inner, inner.parent))
)
"""Folders of the whole machine that containerd, libcni and kubelet cannot be told to have elsewhere."""


def remains() -> list[str]:
    """One line for each thing; empty on a clean machine."""
    found = [f"process {process.pid} ({_command(process.pid)})" for process in _processes()]
    found += [f"process {process.pid} in a pod's cgroup" for process in cgroups.processes(cgroups.ROOT)]
    found += [f"mount {mount}" for mount in mounts.below(state_folder())]
    found += [f"interface {name}" for name in (*_LINKS, *network.plugged_into(_LINKS)) if network.link_exists(name)]
    found += network.filters_left()
    found += [f"cgroup {path}" for path in cgroups.remains(cgroups.ROOT)]
    found += [f"file {path}" for path in _shared_files()]
    found += [f"folder {state_folder()}"] if state_folder().exists() else []
    return found


def remove() -> None:
    """Everything that `remains` lists. The order matters: what holds something goes before what is held."""
    _end_processes()
    mounts.unmount_below(state_folder())
    network.remove_links(network.plugged_into(_LINKS))
    network.remove_links(_LINKS)
    network.remove_filters()
    network.forward_as_before(state_folder())
    cgroups.remove(cgroups.ROOT)
    for path in _shared_files():
        path.unlink(missing_ok=True)
    for folder in _SHARED_FOLDERS:
        with suppress(OSError):  # not there, or somebody else's things are in it
            folder.rmdir()
    if state_folder().exists():
        shutil.rmtree(state_folder())


def _end_processes() -> None:
    """Those that restart others first: a kubelet would bring back a pod, a containerd a shim."""
    for _ in range(5):
        found = _processes()
        if not found:
            break
        for process in sorted(found, key=lambda one: _first_to_go(_command(one.pid))):
            process.end(grace=0)
    cgroups.kill(cgroups.ROOT)


def _first_to_go(command: str) -> bool:
    return command not in ("kubelet", "containerd")


def _processes() -> list[ProcessId]:
    """Without the control planes of tests that are under way."""
    return [one.process for one in marked() if one.owner is None or one.abandoned()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def _shared_files() -> list[Path]:
    rules: Sequence[tuple[Path, Callable[[Path], bool]]] = (
        (_SHIM_SOCKETS, _is_stale_socket),
        (_CONTAINER_LOGS, lambda path: path.is_symlink() and path.readlink().is_relative_to(state_folder())),
        (_DEVICE_PLUGINS, _is_stale_socket),
        (_CNI_RESULTS, lambda path: str(state_folder()) in path.read_text(errors="replace")),  # the pod's namespace
    )
    return [path for folder, ours in rules for path in _entries(folder) if ours(path)]


def _entries(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(folder.iterdir())


def _is_stale_socket(path: Path) -> bool:
    """Nobody listens on it any more; another containerd's shims, if the machine has one, do on theirs."""
    return path.is_socket() and str(path) not in Path("/proc/net/unix").read_text()
