"""Shards cut into segments: what one process turns into tokens at a time, and what a killed preparation keeps.

Segments end where texts are cut anyway (documents.py), so that tokens do not depend on them.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO

from disttrain.corpora.documents import MAX_LINE_BYTES, block_of, end_of_block, reading
from disttrain.corpora.sources import Format, Piece


def cut_into_segments(part: Sequence[Piece], segment_bytes: int, utf8: bool) -> Iterator[tuple[Piece, ...]]:
    """Yield the pieces of each segment: `segment_bytes` together or little more, and the same ones each time.

    Files are read as far as is necessary to find where to cut. A gzip file of more bytes is decompressed here, and
    its pieces hold their text. Raises CorpusError.
    """
    segment: list[Piece] = []
    size = 0
    for piece in part:
        for cut in _pieces(piece, segment_bytes, utf8):
            segment.append(cut)
            size += max(cut.size, len(cut.content or b""))
            if size >= segment_bytes:
                yield tuple(segment)
                segment, size = [], 0
    if segment:
        yield tuple(segment)


def _pieces(piece: Piece, segment_bytes: int, utf8: bool) -> Iterator[Piece]:
    source = piece.source
    if source.format is Format.TABLE or piece.size <= segment_bytes:
        yield piece
    elif source.packed:
        yield from _decompressed(piece, segment_bytes, utf8)
    elif source.format is Format.LINES:
        yield from _between(piece, [*range(piece.start, piece.start + piece.size, segment_bytes)])
    else:
        yield from _between(piece, _starts_of_text(piece, segment_bytes, utf8))


def _between(piece: Piece, starts: Sequence[int]) -> Iterator[Piece]:
    """Yield a piece cut before each of `starts`, of which its own is the first."""
    end = piece.start + piece.size
    for start, stop in zip(starts, [*starts[1:], None], strict=True):
        yield replace(piece, start=start, stop=stop or piece.stop, size=(stop or end) - start)


def _starts_of_text(piece: Piece, segment_bytes: int, utf8: bool) -> list[int]:
    starts, at = [0], 0
    with reading(piece.source), piece.source.path.open("rb") as file:
        while (at := end_of_block(piece.source.path, file, at, utf8)) < piece.size:
            if at - starts[-1] >= segment_bytes:
                starts.append(at)
    return starts


def _decompressed(piece: Piece, segment_bytes: int, utf8: bool) -> Iterator[Piece]:
    source = piece.source
    with reading(source), source.path.open("rb") as packed, gzip.GzipFile(fileobj=packed) as file:
        at = read = 0
        content = _content(piece, file, segment_bytes, utf8)
        while content:
            stop, position = at + len(content), packed.tell()
            following = _content(piece, file, segment_bytes, utf8)
            now = position if following else source.size
            yield Piece(source, now - read, at, stop if following else None, content)
            at, read, content = stop, now, following


def _content(piece: Piece, file: IO[bytes], segment_bytes: int, utf8: bool) -> bytes:
    """Return whole lines, or whole blocks of a text."""
    if piece.source.format is Format.LINES:
        # A line that is too long is reported where it is read as JSON.
        return file.read(segment_bytes) + file.readline(MAX_LINE_BYTES + 1)
    blocks: list[bytes] = []
    while sum(map(len, blocks)) < segment_bytes and (block := block_of(piece.source.path, file, utf8)):
        blocks.append(block)
    return b"".join(blocks)
