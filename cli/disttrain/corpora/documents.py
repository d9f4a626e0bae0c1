"""Text of source files, in blocks of bounded size."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from disttrain.corpora.sources import Format, Piece
from disttrain.corpora.tables import texts
from disttrain_trainer.data.corpora.manifest import CorpusError

BLOCK_BYTES = 2**20
"""Texts longer than this are cut after the next end of a line: no token goes across the cut."""
MAX_LINE_BYTES = 2**26
"""The longest line that a source may have: a line is held in memory as a whole."""


@dataclass(frozen=True)
class Block:
    """Text of a document; `last` says that the document ends with it."""

    text: bytes
    last: bool


def blocks_of(piece: Piece, field: str, utf8: bool) -> Iterator[Block]:
    """Yield the documents of a piece in order. Where not `utf8`, a file of text may hold any bytes.

    Raises CorpusError naming the file and the line.
    """
    path = piece.source.path
    if piece.source.format is Format.TABLE:
        yield from (Block(text.encode(), last=True) for text in texts(path, range(piece.start, piece.stop or 0), field))
        return
    try:
        with _open(piece) as file:
            yield from _text(path, file, utf8) if piece.source.format is Format.TEXT else _lines(piece, file, field)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorpusError(f"{path} is no whole gzip file: {error}") from error
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror or error}") from error


def _open(piece: Piece) -> IO[bytes]:
    path = piece.source.path
    return gzip.open(path, "rb") if piece.source.packed else path.open("rb")


def _text(path: Path, file: IO[bytes], utf8: bool) -> Iterator[Block]:
    block, line = _block(path, file, utf8), 1
    while block:
        following = _block(path, file, utf8)
        if utf8:
            _require_text(path, line, block)
        yield Block(block, last=not following)
        line += block.count(b"\n")
        block = following


def _block(path: Path, file: IO[bytes], utf8: bool) -> bytes:
    block = file.read(BLOCK_BYTES)
    if not utf8 or len(block) < BLOCK_BYTES or block.endswith(b"\n"):
        return block
    # Whole lines, so that no character is cut and hardly a word.
    rest = file.readline(MAX_LINE_BYTES)
    if len(rest) == MAX_LINE_BYTES:
        raise CorpusError(f"{path}: a line has more than {MAX_LINE_BYTES} bytes; break it")
    return block + rest


def _lines(piece: Piece, file: IO[bytes], field: str) -> Iterator[Block]:
    path, at = piece.source.path, piece.start
    if at > 0:
        # The line in which the piece begins belongs to the piece before, unless it begins here.
        file.seek(at - 1)
        at += len(_line(path, file, at)) - 1
    while (piece.stop is None or at < piece.stop) and (line := _line(path, file, at)):
        if line.strip():
            yield Block(_text_of(piece, at, line, field), last=True)
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
    path = piece.source.path
    left, lines = at, 1
    with _open(piece) as file:
        while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
            lines += block.count(b"\n")
            left -= len(block)
    return f"{path}: line {lines}"


def _require_text(path: Path, line: int, block: bytes) -> None:
    try:
        block.decode()
    except UnicodeDecodeError as error:
        line += block[: error.start].count(b"\n")
        raise CorpusError(
            f"{path}: line {line} is no UTF-8 text (byte {block[error.start]:#04x}); convert the file, or leave it out "
            "with --pattern"
        ) from error
