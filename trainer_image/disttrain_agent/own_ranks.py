"""Ranks of a command of the user's own: processes of the pod that introduce themselves, by a file each.

Whoever starts the command knows its process, torchrun for example, and not those of the ranks.
"""

import contextlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from disttrain_agent.environment import stacks_file

_STATE, _STARTED = 0, 19
"""Fields of /proc/PID/stat after the name."""
_ON_LINUX = sys.platform.startswith("linux")


def process_file(folder: Path, rank: int) -> Path:
    """The file in which a rank says which process it is. folder: of the reports."""
    return folder / f"rank-{rank}.process"


def introduce(folder: Path, rank: int) -> None:
    """Say that this process is the rank; it answers for its stacks only after this. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    # A former process of this rank has left it: the signal would end this one.
    stacks_file(folder, rank).unlink(missing_ok=True)
    path = process_file(folder, rank)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(f"{os.getpid()} {_started(os.getpid())}")
    part.replace(path)


class _NoOutput:
    """Lines of a rank, which go to the pod's log alone."""

    def last(self, count: int) -> list[str]:
        return []


@dataclass(frozen=True)
class OwnRank:
    """A rank that has introduced itself. It is nobody's child here, so how it ends is not known."""

    rank: int
    pid: int
    started: str
    """When the process was started, as the kernel counts: another one may have its number later."""
    returncode: int | None = None
    output: _NoOutput = field(default_factory=_NoOutput)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return _started(self.pid) == self.started


class OwnRanks:
    """The ranks of a pod that have introduced themselves and run. folder: of the reports."""

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        self._folder, self._ranks = folder, tuple(ranks)

    @property
    def ranks(self) -> list[OwnRank]:
        """Those that run, by their number."""
        found = (_read(process_file(self._folder, rank), rank) for rank in self._ranks)
        return [one for one in found if one is not None and one.alive]

    @property
    def alive(self) -> list[OwnRank]:
        """The same."""
        return self.ranks


def _read(path: Path, rank: int) -> OwnRank | None:
    with contextlib.suppress(OSError, ValueError):
        pid, _, started = path.read_text().partition(" ")
        return OwnRank(rank, int(pid), started) if int(pid) > 0 and started else None
    return None


def _started(pid: int) -> str:
    """When a process was started; nothing where none runs. Elsewhere than on Linux it is only known that it runs."""
    try:
        if not _ON_LINUX:
            os.kill(pid, 0)
            return "unknown"
        # The name before it may hold anything, also parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if fields[_STATE] in ("Z", "X") else fields[_STARTED]
    except (OSError, IndexError):
        return ""
