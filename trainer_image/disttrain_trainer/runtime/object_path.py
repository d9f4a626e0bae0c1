"""A place in an object store, with those methods of pathlib.Path that checkpoints need.

An object store has no folders and no rename, and shows an object whole or not at all. fsspec and s3fs are imported
where they are used: only jobs with `storage.url` need them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

from disttrain_trainer.runtime.errors import InvalidConfiguration, StoreError, one_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# What has been listed before may have changed since: other ranks write there, too.
OPTIONS = {"use_listings_cache": False}


@dataclass(frozen=True)
class ObjectPath:
    """An object, or what objects below it have in common. Methods raise OSError as those of pathlib.Path do."""

    url: str
    """For example s3://bucket/prefix; no slash at the end."""

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.url.rpartition("/")[0])

    def exists(self) -> bool:
        with _store(self.url) as store:
            return bool(store.exists(self.url))

    def is_file(self) -> bool:
        with _store(self.url) as store:
            return bool(store.isfile(self.url))

    def is_dir(self) -> bool:
        with _store(self.url) as store:
            return bool(store.isdir(self.url))

    def iterdir(self) -> Iterator[ObjectPath]:
        """Return the entries directly below; none if the path does not exist."""
        found: list[str] = []
        with _store(self.url) as store, suppress(FileNotFoundError):
            found = store.ls(self.url, detail=False)
        yield from (self / path.rstrip("/").rpartition("/")[2] for path in found)

    def stat(self) -> SimpleNamespace:
        """`st_size` in bytes, `st_mtime` in seconds since 1970."""
        with _store(self.url) as store:
            return SimpleNamespace(st_size=store.size(self.url), st_mtime=store.modified(self.url).timestamp())

    @contextmanager
    def open(self, mode: str) -> Iterator[IO[bytes]]:
        """Inside, the object is open. Raises OSError also where the store fails while it is read."""
        with _store(self.url) as store, store.open(self.url, mode) as stream:
            yield stream

    def read_bytes(self) -> bytes:
        with _store(self.url) as store:
            return bytes(store.cat_file(self.url))

    def read_range(self, start: int, stop: int) -> bytes:
        """Bytes start .. stop - 1, in one request; fewer where the object is shorter."""
        if start == stop:
            return b""
        with _store(self.url) as store:
            return bytes(store.cat_file(self.url, start=start, end=stop))

    def sizes(self) -> dict[str, int]:
        """Bytes of the objects directly below it, by name, of one listing."""
        found: list[dict[str, Any]] = []
        with _store(self.url) as store, suppress(FileNotFoundError):
            found = store.ls(self.url, detail=True)
        files = (entry for entry in found if entry["type"] == "file")
        return {str(entry["name"]).rpartition("/")[2]: int(entry["size"]) for entry in files}

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def write_text(self, text: str) -> None:
        """One request: the object is the old one or the new one."""
        with _store(self.url) as store:
            store.pipe_file(self.url, text.encode())

    def touch(self) -> None:
        self.write_text("")

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Nothing has to be made."""

    def unlink(self, missing_ok: bool = False) -> None:
        with _store(self.url) as store:
            if not missing_ok or store.exists(self.url):
                store.rm_file(self.url)

    def remove_tree(self) -> None:
        """Delete all objects below it; none is fine."""
        with _store(self.url) as store:
            if store.exists(self.url):
                store.rm(self.url, recursive=True)


def location(text: str) -> Path | ObjectPath:
    """A path of this machine, or the object store that a URL names."""
    return ObjectPath(text.rstrip("/")) if "://" in text else Path(text)


@contextmanager
def _store(url: str) -> Iterator[AbstractFileSystem]:
    """The store's file system. The client library's own errors, such as missing credentials, become OSError."""
    store = _connected(url.partition("://")[0], os.getpid())
    try:
        yield store
    except OSError:
        raise
    except Exception as error:
        if not type(error).__module__.startswith(("botocore", "aiobotocore", "aiohttp")):
            raise
        raise StoreError(None, f"{type(error).__name__}: {one_line(error)}") from error


@cache
def _connected(protocol: str, process: int) -> AbstractFileSystem:
    """process: this one. A fork, such as one that reads data ahead, needs connections of its own."""
    try:
        import fsspec

        return fsspec.filesystem(protocol, **OPTIONS)
    except ImportError as error:
        raise InvalidConfiguration(
            f"`storage.url` {protocol}:// needs a package that this image lacks ({error}): install disttrain[s3]"
        ) from error
