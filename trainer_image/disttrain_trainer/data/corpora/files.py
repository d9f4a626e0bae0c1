"""Ranges of numbers from files that may be shorter than they should be, or become so.

They are read with pread and not through a memory map: where a mapped file is cut short, or its disk fails, the process
dies of SIGBUS; a read comes back short, or with an error that says which file. The pages are the same ones.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from disttrain_trainer.data.corpora.manifest import CorpusError, open_regular

_MAX_OPEN = 256
"""Descriptors of a process for all corpora: a limit of 1024 is common."""


class Source(Protocol):
    """Where the content of a folder's files comes from."""

    @property
    def folder(self) -> Path:
        """Return the folder."""
        ...

    def fill(self, name: str, place: int, size: int) -> dict[int, bytes]:
        """Have a range in a file. Returns blocks of it, by their first byte, that are not in the file after all."""
        ...


class NumberFiles:
    """Files of numbers of one type, of which the latest used are held open."""

    def __init__(self, most_open: int = _MAX_OPEN) -> None:
        self._most_open = most_open
        self._sources: dict[Path, Source] = {}
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read(self, path: Path, dtype: np.dtype[np.generic], start: int, count: int) -> NDArray[np.generic]:
        """Return numbers start .. start + count - 1 of a file. Raises CorpusError where it does not have them."""
        return self.read_at(path, dtype, start * dtype.itemsize, count)

    def read_at(self, path: Path, dtype: np.dtype[np.generic], place: int, count: int) -> NDArray[np.generic]:
        """Return `count` numbers from byte `place` on. Raises CorpusError where the file does not have them."""
        found = np.empty(count, dtype)
        self.read_into(found, path, place)
        return found

    def read_into(self, numbers: NDArray[np.generic], path: Path, place: int) -> None:
        """Fill a row of numbers from byte `place` on. Raises CorpusError where the file does not have them."""
        view, size = memoryview(numbers).cast("B"), numbers.nbytes
        # A path's parent costs half as much as to read a sample.
        source = self._sources.get(path.parent) if self._sources else None
        absent = source.fill(path.name, place, size) if source is not None else {}
        try:
            done = os.preadv(self._descriptor(path), (view,), place)
            # One call reads 2 GiB at most, and some file systems give less.
            while done < size:
                more = os.preadv(self._descriptor(path), (view[done:],), place + done)
                if not more:
                    raise CorpusError(f"{path} is shorter than it was when it was opened")
                done += more
        except OSError as error:
            raise CorpusError(f"{path} cannot be read: {error.strerror}") from error
        for start, block in absent.items():
            first, last = max(start, place), min(start + len(block), place + size)
            view[first - place : last - place] = block[first - start : last - start]

    def attach(self, source: Source) -> None:
        """Read files of the source's folder only when it has filled them."""
        self._sources[source.folder] = source

    def close(self) -> None:
        """Close what is open; a later read opens it again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _descriptor(self, path: Path) -> int:
        found = self._open.get(path)
        if found is None:
            if len(self._open) >= self._most_open:
                os.close(self._open.popitem(last=False)[1])
            found = self._open[path] = open_regular(path)
        else:
            self._open.move_to_end(path)
        return found
