"""A small disk of one's own, to be filled. Needs root; where nobody may mount, the test that wants one is skipped."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str, files: int | None = None) -> Iterator[Path]:
    """Mount a disk of this size, and for so many files and folders, at `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    # Its root is one, too.
    options = f"size={size}" + (f",nr_inodes={files + 1}" if files is not None else "")
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine lets this user mount nothing")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all that is left on the disk of `folder`; the file that does."""
    file = folder / "filler"
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as filler:
        while filler.write(b"x" * 4096):
            continue
    return file
