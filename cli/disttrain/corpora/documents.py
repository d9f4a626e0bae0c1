"""Text of source files, in blocks of bounded size."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO

from disttrain.corpora.sources import Format, Piece, Source
from disttrain.corpora.tables import texts
from disttrain_trainer.data.corpora.manifest import CorpusError

BLOCK_BYTES = 2**16
"""Texts longer than this are cut after the next end of a line: no token goes across the cut. The library tokenizers
takes twice as long for each byte of a text of a MiB."""
MAX_LINE_BYTES = 2**26
"""The longest line that a source may have: a line is held in memory as a whole."""


@dataclass(frozen=True)
class Block:
    """Text of a document; `last` says that the document ends with it."""

    text: bytes
    last: bool
    piece: Piece | None = None
    at: int = 0
    """Where in the piece's file it begins; in a table the number of its row, from 1."""

    def place(self, part: bytes) -> str:
        """Return the file and the line, or row, in which `part` of the text is."""
        if self.piece is None:
            return "text"
        source = self.piece.source
        if source.format is Format.TABLE:
            return f"{source.path}: row {self.at}"
        behind = max(0, self.text.find(part)) if source.format is Format.TEXT else 0
        return _place(self.piece, self.at + behind)


def blocks_of(piece: Piece, field: str, utf8: bool) -> Iterator[Block]:
    """Yield the documents of a piece in order. Where not `utf8`, a file of text may hold any bytes.

    Raises CorpusError naming the file and the line.
    """
    path = piece.source.path
    _require_unchanged(piece)
    if piece.source.format is Format.TABLE:
        for row, text in texts(path, range(piece.start, piece.stop or 0), field):
            yield Block(text.encode(), True, piece, row)
        return
    with reading(piece.source), _open(piece) as file:
        yield from _text(piece, file, utf8) if piece.source.format is Format.TEXT else _lines(piece, file, field)


@contextmanager
def reading(source: Source) -> Iterator[None]:
    """Errors of a file that is read become sentences that name it."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorpusError(f"{source.path} is no whole gzip file: {error}") from error
    except OSError as error:
        raise CorpusError(f"{source.path} cannot be read: {error.strerror or error}") from error


def block_of(path: Path, file: IO[bytes], utf8: bool) -> bytes:
    """Return the text from where a file stands to the end of its block; nothing at the end of the file."""
    block = file.read(BLOCK_BYTES)
    if not utf8 or len(block) < BLOCK_BYTES or block.endswith(b"\n"):
        return block
    return block + _rest_of_line(path, file)


def end_of_block(path: Path, file: IO[bytes], start: int, utf8: bool) -> int:
    """Return where the block of text ends that begins at byte `start`, reading no more than its last line.

    It is behind the file's last byte where the file ends within it.
    """
    end = start + BLOCK_BYTES
    if not utf8:
        return end
    file.seek(end - 1)
    return end if file.read(1) in (b"\n", b"") else end + len(_rest_of_line(path, file))


def _rest_of_line(path: Path, file: IO[bytes]) -> bytes:
    # Whole lines, so that no character is cut and hardly a word.
    rest = file.readline(MAX_LINE_BYTES)
    if len(rest) == MAX_LINE_BYTES:
        raise CorpusError(f"{path}: a line has more than {MAX_LINE_BYTES} bytes; break it")
    return rest


def _require_unchanged(piece: Piece) -> None:
    source = piece.source
    with reading(source):
        now = source.path.stat()
    if (now.st_size, now.st_mtime_ns) != (source.size, source.modified):
        raise CorpusError(f"{source.path} has changed since it was first looked at: prepare when nothing writes to it")


def _open(piece: Piece) -> IO[bytes]:
    """Return a file that stands where the piece begins."""
    if piece.content is not None:
        return BytesIO(piece.content)
    file = _open_whole(piece.source)
    file.seek(piece.start)
    return file


def _open_whole(source: Source) -> IO[bytes]:
    return gzip.open(source.path, "rb") if source.packed else source.path.open("rb")


def _text(piece: Piece, file: IO[bytes], utf8: bool) -> Iterator[Block]:
    path, at = piece.source.path, piece.start
    block = block_of(path, file, utf8)
    while block:
        stop = at + len(block)
        following = block_of(path, file, utf8) if piece.stop is None or stop < piece.stop else b""
        if utf8:
            _require_text(piece, at, block)
        yield Block(block, piece.stop is None and not following, piece, at)
        at, block = stop, following


def _lines(piece: Piece, file: IO[bytes], field: str) -> Iterator[Block]:
    path, at = piece.source.path, piece.start
    if at > 0 and piece.content is None:
        # The line in which the piece begins belongs to the piece before, unless it begins here.
        file.seek(at - 1)
        at += len(_line(path, file, at)) - 1
    while (piece.stop is None or at < piece.stop) and (line := _line(path, file, at)):
        if line.strip():
            yield Block(_text_of(piece, at, line, field), True, piece, at)
        at += len(line)


def _line(path: Path, file: IO[bytes], at: int) -> bytes:
    line = file.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        raise CorpusError(f"{path}: the line at byte {at} has more than {MAX_LINE_BYTES} bytes")
    return line


def _text_of(piece: Piece, at: int, line: bytes, field: str) -> bytes:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CorpusError(f"{_place(piece, at)} is not JSON: {why}") from error
    if not isinstance(value, dict):
        raise CorpusError(f"{_place(piece, at)} is a {type(value).__name__}, expected an object with `{field}`")
    if not isinstance(text := value.get(field), str):
        names = ", ".join(sorted(map(repr, value))[:10]) or "nothing"
        raise CorpusError(
            f"{_place(piece, at)} has no text in `{field}`; it has {names:.300}; name the field with --field"
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(f"{_place(piece, at)} holds half a character (\\ud800 to \\udfff)") from error


def _place(piece: Piece, at: int) -> str:
    """Return file and line; counts the lines before, which is done for an error alone."""
    left, lines = at, 1
    with reading(piece.source), _open_whole(piece.source) as file:
        while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
            lines += block.count(b"\n")
            left -= len(block)
    return f"{piece.source.path}: line {lines}"


def _require_text(piece: Piece, at: int, block: bytes) -> None:
    try:
        block.decode()
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{_place(piece, at + error.start)} is no UTF-8 text (byte {block[error.start]:#04x}); convert the file, "
            "or leave it out with --pattern"
        ) from error
