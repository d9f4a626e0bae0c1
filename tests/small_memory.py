"""A control group with a memory limit, for programs that run into it. Needs root; elsewhere its test is skipped."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from disttrain_agent.control_groups import control_groups
from tests.waiting import until

# Version 2, then version 1.
_LIMITS = ("memory.max", "memory.limit_in_bytes")


@contextlib.contextmanager
def small_memory(size: int) -> Iterator[list[str]]:
    """Yield the words before a command with which it and all that it starts have so many bytes together."""
    group = _group(size)
    if group is None:
        pytest.skip("this machine lets this user limit no memory")
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        # A process that was killed may be on its way out.
        until(lambda: _is_removed(group), lambda: f"{group} has processes: {(group / 'cgroup.procs').read_text()}")


def _group(size: int) -> Path | None:
    """Make the group, in the innermost one of this process where that is possible."""
    for parent in control_groups(Path("/"), "memory"):
        group = parent / f"disttrain-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            if (control := parent / "cgroup.subtree_control").exists():
                control.write_text("+memory")
            group.mkdir()
            for limit in _LIMITS:
                if (group / limit).exists():
                    (group / limit).write_text(str(size))
                    return group
            group.rmdir()
    return None


def _is_removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
