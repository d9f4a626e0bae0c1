"""Files of JSON Lines in blocks of bytes: a line belongs to the block in which it begins.

So any block is found and read by itself, whatever the files hold, and nothing has to be known of them but their sizes.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from pydantic_core import from_json

from disttrain_trainer.runtime.errors import DataNotFound, shown
from disttrain_trainer.runtime.files import open_regular
from disttrain_trainer.runtime.object_path import ObjectPath, location

BLOCK = 2**16
"""Bytes. An object store takes about as long for an answer as to send so many."""
MAX_LINE_BYTES = 2**24
"""The longest line: it is held in memory as a whole, and so are its tokens."""
SUFFIXES = (".jsonl", ".ndjson")
_MAX_FILES = 100_000


@dataclass(frozen=True)
class Source:
    """A file or object."""

    name: str
    """Its path in the folder: the same on every machine."""
    place: Path | ObjectPath
    size: int


class Blocks:
    """The blocks of all files, in the order of their names."""

    def __init__(self, sources: list[Source], field: str) -> None:
        """field: of each line, with its text."""
        self.sources, self._field = sources, field
        self._starts = [0, *accumulate(-(-source.size // BLOCK) for source in sources)]

    def __len__(self) -> int:
        return self._starts[-1]

    def texts(self, number: int) -> list[str]:
        """Return the texts of the lines that begin in a block. Raises DataNotFound naming the line by its place."""
        at = bisect_right(self._starts, number) - 1
        source, begin = self.sources[at], (number - self._starts[at]) * BLOCK
        return [self._text(source, place, line) for place, line in _lines(source, begin) if line.strip()]

    def _text(self, source: Source, at: int, line: bytes) -> str:
        try:
            value = from_json(line, allow_inf_nan=False)
        except ValueError as error:
            raise _error(source, at, f"it is no JSON: {shown(str(error)):.300}") from error
        text = value.get(self._field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            names = ", ".join(map(shown, sorted(value)[:10])) if isinstance(value, dict) else "no fields"
            raise _error(
                source,
                at,
                f"it has no text in `{shown(self._field)}`; it has {names:.300}: name the field in "
                "`training.data.config.field`",
            )
        return text


def open_blocks(path: str, field: str) -> Blocks:
    """Return the blocks of a file, or of the files in a folder. Raises DataNotFound, and StoreError for a store that
    does not answer."""
    place = location(path)
    try:
        sources = _objects(place) if isinstance(place, ObjectPath) else _files(place)
    except OSError as error:
        if isinstance(place, ObjectPath) and not isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise DataNotFound(f"`training.data.config.path`: {place} cannot be read: {error.strerror or error}") from error
    if not 1 <= len(sources) <= _MAX_FILES:
        raise DataNotFound(
            f"`training.data.config.path`: {place} has {len(sources)} files that end with {' or '.join(SUFFIXES)}, "
            f"expected 1 to {_MAX_FILES}; other files, and compressed ones, are for `disttrain data prepare`"
        )
    return Blocks(sources, field)


def _files(path: Path) -> list[Source]:
    if not path.exists():
        raise DataNotFound(f"`training.data.config.path`: {path} does not exist (from {Path.cwd()})")
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
    sources = []
    for file in found:
        with open_regular(Path(os.path.realpath(file))) as opened:
            sources.append(Source(str(file.relative_to(path)), file, os.fstat(opened.fileno()).st_size))
    return sources


def _objects(store: ObjectPath) -> list[Source]:
    if store.suffix in SUFFIXES:
        return [Source(store.name, store, store.stat().st_size)]
    sizes = store.sizes()
    return [Source(name, store / name, sizes[name]) for name in sorted(sizes) if Path(name).suffix in SUFFIXES]


def _lines(source: Source, begin: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in the block, each with its place in the file."""
    # The byte before says whether a line begins with the block.
    content, first = _read(source, max(0, begin - 1), begin + BLOCK), max(0, begin - 1)
    at = content.find(b"\n") + 1 if begin else 0
    if begin and at == 0:
        return
    while at < len(content):
        end = content.find(b"\n", at) + 1
        while end == 0 and first + len(content) < source.size:
            if len(content) - at > MAX_LINE_BYTES:
                raise _error(source, first + at, f"it has more than {MAX_LINE_BYTES} bytes; split the text")
            more = _read(source, first + len(content), first + 2 * len(content))
            end = (len(content) + more.find(b"\n") + 1) if b"\n" in more else 0
            content += more
        line = content[at : end or len(content)]
        yield first + at, line
        at += len(line)
        # What was read beyond the block is the end of its last line.
        if first + at >= begin + BLOCK:
            return


def _read(source: Source, start: int, stop: int) -> bytes:
    stop = min(stop, source.size)
    try:
        if isinstance(source.place, ObjectPath):
            content = source.place.read_range(start, stop)
        else:
            with open_regular(Path(os.path.realpath(source.place))) as file:
                file.seek(start)
                content = file.read(stop - start)
    except OSError as error:
        if isinstance(source.place, ObjectPath) and not isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise _error(source, start, f"it cannot be read: {error.strerror or error}") from error
    if len(content) < stop - start:
        raise _error(source, start, f"the file has become shorter than {source.size} bytes since the job began")
    return content


def _error(source: Source, at: int, why: str) -> DataNotFound:
    return DataNotFound(f"`training.data.config.path`: {source.place}: the line at byte {at}: {why}")
