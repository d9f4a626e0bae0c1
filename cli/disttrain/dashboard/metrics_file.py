"""Curves of a metrics.jsonl that grows: each look reads what is new, up to a bound."""

import os
from pathlib import Path
from typing import Any

import orjson

from disttrain_dashboard.views.curves import Curves

MAX_BYTES = 8 * 2**20
"""What one look reads; the next goes on there."""
MAX_LINE = 2**16


class MetricsFile:
    """A metrics.jsonl, and what is drawn of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self._inode, self._offset, self._rest = inode, 0, b""
        self._curves = Curves()

    def panels(self) -> list[dict[str, Any]]:
        """Return the curves as far as they are read. None where there is no file."""
        try:
            with self._path.open("rb") as file:
                known = os.fstat(file.fileno())
                if known.st_ino != self._inode or known.st_size < self._offset:
                    self._begin(known.st_ino)
                file.seek(self._offset)
                new = file.read(MAX_BYTES)
        except OSError:
            return self._curves.panels()
        self._offset += len(new)
        *lines, rest = (self._rest + new).split(b"\n")
        # Only the begin of a line without an end is kept, which is no JSON.
        self._rest = rest[:MAX_LINE]
        self._curves.add_lines(_decoded(line) for line in lines if len(line) < MAX_LINE)
        return self._curves.panels()


def _decoded(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except ValueError:
        return None
