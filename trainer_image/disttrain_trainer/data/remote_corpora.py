"""Corpora in an object store, of which a folder of this machine keeps the blocks that were read.

Samples come in random order, so a rank's first step reads a little of every shard: whole shards would have to arrive
before it. Blocks arrive as they are asked for, and after an epoch the folder has them all. Its files are sparse and as
long as the objects; beside each lies a file with a byte for each block that is there, which is set after the block was
written. Processes that share the folder need no lock: what two of them fetch at once is the same.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from disttrain_trainer.data.corpora.corpus import Corpus, open_corpus
from disttrain_trainer.data.corpora.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    CorpusError,
    CorpusManifest,
    shard_files,
)
from disttrain_trainer.data.corpora.megatron import open_indexed
from disttrain_trainer.runtime.object_path import ObjectPath

BLOCK = 2**20
"""Bytes. An object store takes some 20 ms for an answer, in which it also sends about so many."""
_AT_ONCE = 16
"""Blocks of one request at most."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Kept:
    """Objects of a folder in a store, and their files here."""

    def __init__(self, store: ObjectPath, folder: Path) -> None:
        """folder: there already; it belongs to these objects as they are."""
        self.store, self.folder = store, folder
        self._sizes: dict[str, int] = {}
        self._known: dict[str, bytearray] = {}

    def add(self, sizes: Mapping[str, int]) -> None:
        """Make the files of objects of these sizes. Raises CorpusError."""
        for name, size in sizes.items():
            with self._file(name) as file:
                file.truncate(size)
        self._sizes |= sizes

    def fill(self, name: str, place: int, size: int) -> dict[int, bytes]:
        """Have the blocks of a range in the file. Returns those, by their first byte, for which there is no room.

        Raises CorpusError where the object is gone or another one now; StoreError where the store does not answer.
        """
        last = max(min(place + size, self._sizes[name]), place + 1) - 1
        blocks = range(place // BLOCK, last // BLOCK + 1)
        known = self._known.setdefault(name, bytearray(-(-self._sizes[name] // BLOCK)))
        if all(known[blocks.start : blocks.stop]):
            return {}
        with self._file(f"{name}.kept") as flags:
            flags.seek(blocks.start)
            # What others have fetched meanwhile.
            known[blocks.start : blocks.stop] = flags.read(len(blocks)).ljust(len(blocks), b"\0")
        homeless: dict[int, bytes] = {}
        for run in _runs([block for block in blocks if not known[block]]):
            content = self._fetch(name, run)
            if not self._write(name, run, content):
                homeless[run.start * BLOCK] = content
                continue
            with self._file(f"{name}.kept") as flags:
                flags.seek(run.start)
                flags.write(b"\1" * len(run))
            known[run.start : run.stop] = b"\1" * len(run)
        return homeless

    def _fetch(self, name: str, run: range) -> bytes:
        place, start, stop = self.store / name, run.start * BLOCK, min(run.stop * BLOCK, self._sizes[name])
        with _store_errors(place):
            content = place.read_range(start, stop)
        if len(content) != stop - start:
            raise CorpusError(f"{place} is shorter than it was when it was opened")
        return content

    def _write(self, name: str, run: range, content: bytes) -> bool:
        """Whether there was room for it."""
        with self._file(name) as file:
            try:
                file.seek(run.start * BLOCK)
                while content:
                    content = content[file.write(content) :]
            except OSError:
                return False
        return True

    @contextmanager
    def _file(self, name: str) -> Iterator[FileIO]:
        """A file of the folder, which is made where it is not there. Raises CorpusError."""
        try:
            descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CorpusError(f"{self.folder / name} cannot be written: {error.strerror}") from error
        with FileIO(descriptor, "rb+") as file:
            yield file


@contextmanager
def _store_errors(place: ObjectPath) -> Iterator[None]:
    """Turn what is missing or forbidden into CorpusError. That a store does not answer passes: it may the next time."""
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise CorpusError(f"{place} cannot be read: {error}") from error


def open_remote(store: ObjectPath, cache: Path | None, attach: Callable[[Kept], None]) -> Corpus:
    """Return a corpus in an object store. attach: is given its objects before anything is read of them.

    cache: a folder of this machine, which other jobs may share; None: one that ends with the pod. Raises CorpusError,
    StoreError.
    """
    with _store_errors(store / MANIFEST_FILE):
        size = (store / MANIFEST_FILE).stat().st_size
        if size > MAX_MANIFEST_BYTES:
            raise CorpusError(f"{store / MANIFEST_FILE} has more than {MAX_MANIFEST_BYTES} bytes")
        text = (store / MANIFEST_FILE).read_range(0, size)
    kept = Kept(store, _folder(cache, str(store), text))
    _put(kept.folder / MANIFEST_FILE, text)
    try:
        manifest = CorpusManifest.model_validate_json(text)
        names = [name for shard in manifest.shards for name in shard_files(shard.number)]
    except ValueError:
        names = []  # What is wrong with it is said where it is read.
    with _store_errors(store):
        found = store.sizes()
    if missing := next((name for name in names if name not in found), None):
        raise CorpusError(f"{store / missing} cannot be read: there is no such object")
    kept.add({name: found[name] for name in names})
    attach(kept)
    return open_corpus(kept.folder)


def open_remote_indexed(
    tokens: ObjectPath, cache: Path | None, vocabulary: int, attach: Callable[[Kept], None]
) -> Corpus:
    """Return an indexed data set of Megatron-LM in an object store, as `open_remote`. tokens: either file of it."""
    stem, store = tokens.name.rpartition(".")[0], tokens.parent
    index, names = f"{stem}.idx", (f"{stem}.idx", f"{stem}.bin")
    with _store_errors(store):
        sizes = {name: size for name, size in store.sizes().items() if name in names}
    if len(sizes) < len(names):
        raise CorpusError(f"{store / stem}.idx and .bin cannot be read: there are no such objects")
    kept = Kept(store, _folder(cache, str(store / stem), repr(sorted(sizes.items())).encode()))
    kept.add(sizes)
    # It is read without NumberFiles, too.
    if kept.fill(index, 0, sizes[index]):
        raise CorpusError(f"{kept.folder} has no room for {store / index}, whose {sizes[index]} bytes are read at once")
    attach(kept)
    return open_indexed(kept.folder / index, vocabulary)


def _folder(cache: Path | None, url: str, identity: bytes) -> Path:
    """Return the folder of these objects. After a start of the machine it is another one: what was written last before
    may not have come to the disk."""
    boot = _BOOT.read_bytes() if _BOOT.exists() else b""
    digest = hashlib.sha256(b"\0".join([url.encode(), identity, boot])).hexdigest()
    folder = (cache or Path(tempfile.gettempdir(), "disttrain-corpora")) / digest[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"{folder.parent} cannot keep a corpus: {error.strerror}") from error
    return folder


def _put(path: Path, text: bytes) -> None:
    """Write a file at once: other processes may write the same."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    except OSError as error:
        raise CorpusError(f"{path} cannot be written: {error.strerror}") from error


def _runs(blocks: list[int]) -> Iterator[range]:
    """Yield neighbours as ranges of _AT_ONCE blocks at most."""
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1 or at - start == _AT_ONCE:
            yield range(blocks[start], blocks[at - 1] + 1)
            start = at
