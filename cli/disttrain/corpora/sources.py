"""Source files, and the parts of them that become a shard each: the same ones however many processes there are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch
from pathlib import Path

from disttrain.corpora.settings import Settings
from disttrain.corpora.tables import group_sizes
from disttrain_trainer.data.corpora.manifest import MAX_SHARDS, CorpusError

_LINES = (".jsonl", ".ndjson")
_TABLE = ".parquet"
GZIP = ".gz"


class Format(StrEnum):
    """Content of a file, by the end of its name."""

    TEXT = "text"
    LINES = "lines"
    TABLE = "table"


@dataclass(frozen=True)
class Source:
    """A file as it was when the preparation was planned."""

    path: Path
    size: int
    modified: int
    """Nanoseconds."""

    @property
    def format(self) -> Format:
        """Its content."""
        if self._name.endswith(_TABLE):
            return Format.TABLE
        return Format.LINES if self._name.endswith(_LINES) else Format.TEXT

    @property
    def packed(self) -> bool:
        """Whether it is a gzip file, which can be read from its beginning alone."""
        return self.path.name.lower().endswith(GZIP)

    @property
    def _name(self) -> str:
        return self.path.name.lower().removesuffix(GZIP)


@dataclass(frozen=True)
class Piece:
    """Documents of a file that begin at bytes start .. stop - 1; stop is None for all that follow. In a table these
    are row groups instead of bytes."""

    source: Source
    size: int
    """Bytes, about."""
    start: int = 0
    stop: int | None = None
    content: bytes | None = None
    """These bytes, where they are of a gzip file that somebody else decompresses. They begin with a line."""


def find_sources(settings: Settings) -> list[Source]:
    """Return all files in an order that does not depend on the file system. Raises CorpusError naming the path."""
    found: list[Source] = []
    for given in settings.sources:
        if not given.exists():
            raise CorpusError(f"{given} does not exist (from {Path.cwd()})")
        if given.is_dir():
            _require_outside(given, settings.output)
            files = sorted(_files_below(given, settings.pattern))
            if not files:
                raise CorpusError(f"{given} holds no file that matches '{settings.pattern}'")
        else:
            files = [given]
        found += [_source(file) for file in files]
    return found


def cut_into_parts(sources: Sequence[Source], part_bytes: int) -> list[tuple[Piece, ...]]:
    """Return what each shard is made of: pieces in order, of `part_bytes` together or little more.

    A file of text is one document and is not cut, nor is a gzip file; a file of lines is cut between two of
    them, a table between two row groups.
    Raises CorpusError for too many.
    """
    parts: list[tuple[Piece, ...]] = []
    part: list[Piece] = []
    for piece in _pieces(sources, part_bytes):
        part.append(piece)
        if sum(one.size for one in part) >= part_bytes:
            parts.append(tuple(part))
            part = []
    if part:
        parts.append(tuple(part))
    if len(parts) > MAX_SHARDS:
        raise CorpusError(f"{len(parts)} shards, expected at most {MAX_SHARDS}: use a larger --shard-size")
    return parts


def _pieces(sources: Sequence[Source], part_bytes: int) -> Iterator[Piece]:
    for source in sources:
        if source.format is Format.TABLE:
            for group, size in enumerate(group_sizes(source.path)):
                yield Piece(source, size, group, group + 1)
        elif source.format is Format.TEXT or source.packed or source.size <= part_bytes:
            yield Piece(source, source.size)
        else:
            for start in range(0, source.size, part_bytes):
                stop = start + part_bytes
                yield Piece(source, min(part_bytes, source.size - start), start, stop if stop < source.size else None)


def _files_below(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield files, but none whose name, or that of a folder on the way to it, begins with a dot; links are left out."""
    for place, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and fnmatch(name, pattern) and path.is_file() and not path.is_symlink():
                yield path


def _raise(error: OSError) -> None:
    raise CorpusError(f"{error.filename} cannot be read: {error.strerror}")


def _require_outside(folder: Path, output: Path) -> None:
    if output.absolute().resolve().is_relative_to(folder.resolve()):
        raise CorpusError(f"{output} lies in {folder}, which is read: write to another folder")


def _source(path: Path) -> Source:
    try:
        known = path.stat()
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}") from error
    return Source(path, known.st_size, known.st_mtime_ns)
