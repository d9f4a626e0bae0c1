"""A file system and an object store in memory whose every operation is one of interleavings.py."""

import errno
import io
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from tests.unit.trainer.interleavings import Operation, Port

FOLDER = "/"
"""Content of what is a folder."""
Parts = tuple[str, ...]


def on_disk(disk: dict[Parts, Any], operation: Operation) -> Any:
    """Do what a file system does; a rename is refused where a folder with content has the name."""
    name, (path, *arguments) = operation
    if name == "list":
        _require(disk.get(path) == FOLDER, errno.ENOENT)
        return tuple(sorted(entry[-1] for entry in disk if entry[:-1] == path and entry != path))
    if name == "is_file":
        return disk.get(path, FOLDER) != FOLDER
    if name == "read":
        _require(path in disk, errno.ENOENT)
        return disk[path]
    if name == "write":
        _require(disk.get(path[:-1]) == FOLDER, errno.ENOENT)
        disk[path] = arguments[0]
    if name == "make folder":
        _require(path[:-1] in disk, errno.ENOENT)
        disk[path] = FOLDER
    if name == "unlink":
        _require(path in disk, errno.ENOENT)
        del disk[path]
    if name == "remove folder":
        _require(path in disk, errno.ENOENT)
        _require(not any(entry[: len(path)] == path and entry != path for entry in disk), errno.ENOTEMPTY)
        del disk[path]
    if name == "rename":
        (target,) = arguments
        _require(path in disk, errno.ENOENT)
        _require(not any(entry[: len(target)] == target and entry != target for entry in disk), errno.ENOTEMPTY)
        for entry in [entry for entry in disk if entry[: len(path)] == path]:
            disk[(*target, *entry[len(path) :])] = disk.pop(entry)
    return None


def _require(holds: bool, otherwise: int) -> None:
    if not holds:
        raise OSError(otherwise, "no")


class MemoryPath:
    """What the trainer calls of a pathlib.Path."""

    def __init__(self, port: Port, parts: Parts = ()) -> None:
        self._port, self._parts = port, parts

    def __truediv__(self, name: str) -> "MemoryPath":
        return MemoryPath(self._port, (*self._parts, name))

    def __str__(self) -> str:
        return "/".join(("", *self._parts))

    @property
    def name(self) -> str:
        return self._parts[-1]

    @property
    def parent(self) -> "MemoryPath":
        return MemoryPath(self._port, self._parts[:-1])

    def iterdir(self) -> "list[MemoryPath]":
        return [self / name for name in self._port("list", self._parts)]

    def is_file(self) -> bool:
        return bool(self._port("is_file", self._parts))

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=len(self._port("read", self._parts)), st_mtime=0)

    def open(self, mode: str) -> io.BytesIO:
        assert mode == "rb"
        return io.BytesIO(self._port("read", self._parts))

    def write_text(self, text: str) -> None:
        """As files.write_atomically writes."""
        self._port("write", self._parts, text.encode())

    def touch(self) -> None:
        self.write_text("")

    def mkdir(self) -> None:
        self._port("make folder", self._parts)

    def rename(self, target: "MemoryPath") -> None:
        self._port("rename", self._parts, target._parts)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._port("unlink", self._parts)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """As shutil.rmtree, one file after the other; what is gone meanwhile is no error."""
        try:
            for entry in self.iterdir():
                entry.unlink(missing_ok=True)
            self._port("remove folder", self._parts)
        except OSError:
            return


def in_store(store: dict[str, bytes], operation: Operation) -> Any:
    """Do what an object store does: no folders, no rename, each object whole or not at all."""
    name, (url, *arguments) = operation
    if name == "list":
        below = [key[len(url) + 1 :] for key in store if key.startswith(f"{url}/")]
        _require(bool(below), errno.ENOENT)
        return tuple(sorted({key.partition("/")[0] for key in below}))
    if name == "exists":
        return url in store
    if name == "read":
        _require(url in store, errno.ENOENT)
        return store[url]
    if name == "write":
        store[url] = arguments[0]
    if name == "delete":
        store.pop(url, None)
    return None


class MemoryStore:
    """What the trainer calls of fsspec's file systems."""

    def __init__(self, port: Port) -> None:
        self._port = port

    def ls(self, url: str, detail: bool) -> list[str]:
        assert not detail
        return [f"{url}/{name}" for name in self._port("list", url)]

    def exists(self, url: str) -> bool:
        return bool(self._port("exists", url))

    def size(self, url: str) -> int:
        return len(self._port("read", url))

    def modified(self, url: str) -> datetime:
        return datetime.fromtimestamp(0, UTC)

    def open(self, url: str, mode: str) -> io.BytesIO:
        assert mode == "rb"
        return io.BytesIO(self._port("read", url))

    def cat_file(self, url: str) -> bytes:
        return bytes(self._port("read", url))

    def pipe_file(self, url: str, content: bytes) -> None:
        self._port("write", url, content)

    def rm_file(self, url: str) -> None:
        self._port("delete", url)

    def rm(self, url: str, recursive: bool) -> None:
        assert recursive
        for name in self._port("list", url):
            self._port("delete", f"{url}/{name}")
