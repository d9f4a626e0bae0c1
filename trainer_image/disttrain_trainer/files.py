"""Files that are never seen half written."""

import os
from pathlib import Path

from disttrain_trainer.object_path import ObjectPath


def write_atomically(path: Path | ObjectPath, text: str) -> None:
    """Write to a temporary name beside `path`, then rename. An object is never half written."""
    if isinstance(path, ObjectPath):
        path.write_text(text)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
