"""The control groups that this process is in."""

from collections.abc import Iterator
from pathlib import Path


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, from its own to the root, of either version.

    root: of a file system that shows /proc and /sys.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container the path may be the host's, and what is mounted is the container's own group.
        below = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(below), -1, -1):
            yield top.joinpath(*below[:depth])
