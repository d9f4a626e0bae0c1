"""What a full cluster asks of the machine. Each lack is one line that says what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tools.cluster import cgroups, network
from tools.cluster.errors import MissingError
from tools.cluster.nodes import cni_plugins
from tools.cluster.paths import state_folder

_COMMANDS = ("containerd", "ctr", "runc", "iptables-save", "iptables-restore", "conntrack", "ip", "openssl", "socat")
_ROOM = 25 << 30
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_LONGEST_SOCKET = 107


def check() -> None:
    if os.geteuid() != 0:
        raise MissingError("a cluster with nodes needs root: run it with sudo, or set KUBECONFIG to a cluster you have")
    if lacking := [name for number, name in _capabilities() if not _granted(number)]:
        raise MissingError(f"this container or machine lacks {' and '.join(lacking)}: run it with more privileges")
    if absent := [command for command in _COMMANDS if not shutil.which(command)]:
        raise MissingError(f"{', '.join(absent)} missing: `bash .ci/install-debian cluster` installs what is needed")
    cni_plugins()
    _check_cgroups()
    _check_other_nodes()
    longest = state_folder() / "node1" / "containerd.sock.ttrpc"
    if len(str(longest)) > _LONGEST_SOCKET:
        raise MissingError(f"{longest} is too long for a socket's path: set XDG_STATE_HOME to a shorter folder")


def room_warning() -> str | None:
    """The trainer's image alone is 5 GB, several times over."""
    folder = next(parent for parent in (state_folder(), *state_folder().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if free >= _ROOM:
        return None
    return f"only {free >> 30} GB are free at {folder}; with the trainer's image a cluster takes about {_ROOM >> 30} GB"


def _capabilities() -> Iterator[tuple[int, str]]:
    yield _CAP_NET_ADMIN, "CAP_NET_ADMIN"
    yield _CAP_SYS_ADMIN, "CAP_SYS_ADMIN"


def _granted(capability: int) -> bool:
    status = Path("/proc/self/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(mask, 16) >> capability & 1)


def _check_cgroups() -> None:
    try:
        cgroups.make(cgroups.ROOT)
    except OSError as refused:
        reason = f"cgroups cannot be made here ({refused}): the machine must mount /sys/fs/cgroup writable"
        raise MissingError(reason) from refused


def _check_other_nodes() -> None:
    """Another kubelet would share our packet filter's chains; `down` would remove them under its feet."""
    if not state_folder().exists() and any("KUBE-" in chain for chain in network.filters_left()):
        raise MissingError(
            "this machine has iptables chains of another Kubernetes: set KUBECONFIG to that cluster, "
            "or, if they are remains, remove them by `python -m tools.cluster down`"
        )
