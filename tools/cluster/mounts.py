"""Mounts below a folder: found in the kernel's list, not remembered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.cluster.shell import run, succeeds


def below(folder: Path) -> Sequence[str]:
    return listed_below(Path("/proc/self/mountinfo").read_text(), folder)


def listed_below(mountinfo: str, folder: Path) -> Sequence[str]:
    """Mount points at or below a folder, outer before inner, in the order in which /proc/self/mountinfo lists them."""
    points = [line.split()[4].replace("\\040", " ") for line in mountinfo.splitlines()]
    return [point for point in points if Path(point).is_relative_to(folder)]


def unmount_below(folder: Path) -> None:
    for mount in reversed(below(folder)):
        if not succeeds(["umount", mount]):
            run(["umount", "--lazy", mount])
