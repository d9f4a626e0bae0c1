"""How many processes of this container the kernel has killed for want of memory."""

from collections.abc import Iterator
from pathlib import Path


def memory_kills(root: Path = Path("/")) -> int | None:
    """Return the count of the control group that this process is in; None where the system does not tell.

    root: of a file system that shows /proc and /sys.
    """
    for file in _files(root):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for name, _, count in (line.partition(" ") for line in lines):
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return None


def _files(root: Path) -> Iterator[Path]:
    """Files that may hold the count, of either version of control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # In a container the path may be the host's, while its own group is what is mounted.
        below = [part for part in path.split("/") if part not in ("", "..")]
        yield top.joinpath(*below, name)
        yield top / name
