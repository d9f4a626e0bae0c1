"""How many processes of this container the kernel has killed for want of memory."""

from pathlib import Path

from disttrain_agent.control_groups import control_groups


def memory_kills(root: Path = Path("/")) -> int | None:
    """Return the count of the control group that this process is in; None where the system does not tell.

    root: of a file system that shows /proc and /sys.
    """
    for folder in control_groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _count(folder / name)) is not None:
                return count
    return None


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    counts = (count for name, _, count in (line.partition(" ") for line in lines) if name == "oom_kill")
    return next((int(count) for count in counts if count.isdigit()), None)
