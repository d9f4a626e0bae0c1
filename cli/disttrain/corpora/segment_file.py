"""A segment's file: its tokens, where documents end among them, and how many there are of each."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from disttrain.corpora.documents import BLOCK_BYTES, Block
from disttrain.corpora.encoders import Encoder, SpelledTokenError
from disttrain_trainer.data.corpora.manifest import OFFSET, CorpusError, Tokenizer

_BATCH_BYTES = 2**20
"""Texts of so many bytes are encoded at once, or one longer one."""
_COPIED_BYTES = 2**22
_TRAILER = 3


@dataclass(frozen=True)
class Segment:
    """A segment that was written."""

    path: Path
    dtype: np.dtype[np.unsignedinteger]
    tokens: int
    documents: int
    """How many end in it."""
    closes: bool
    """Whether a document that began in a segment before ends where this one begins."""

    def ends(self, file: IO[bytes]) -> NDArray[np.unsignedinteger]:
        """Return the tokens before the end of each document."""
        file.seek(self.tokens * self.dtype.itemsize)
        return np.fromfile(file, OFFSET, self.documents)

    def content(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the bytes of its tokens. Raises CorpusError where some are missing."""
        file.seek(0)
        left = self.tokens * self.dtype.itemsize
        while left > 0:
            block = file.read(min(left, _COPIED_BYTES))
            if not block:
                raise CorpusError(f"{self.path} was cut while it was read: run the same command again")
            left -= len(block)
            yield block


def write_segment(
    path: Path,
    blocks: Iterable[Block],
    encoder: Encoder,
    dtype: np.dtype[np.unsignedinteger],
    tokenizer: Tokenizer,
) -> int:
    """Write a file that is never seen half written, and return how many tokens it holds.

    Raises CorpusError for bad input, OSError where the disk is full.
    """
    begin, end = around_documents(tokenizer, dtype)
    temporary = path.with_name(f".{path.name}.tmp")
    ends, count, start, closes = array("Q"), 0, 0, False
    with temporary.open("wb", buffering=BLOCK_BYTES) as file:
        for found, last in _encoded(blocks, encoder):
            if ends and count == start and len(found):
                # Whether the first one begins here is known when the segments before are there.
                file.write(begin.tobytes())
                count += len(begin)
            file.write(found.astype(dtype).tobytes())
            count += len(found)
            if last and count > start:
                file.write(end.tobytes())
                count = start = count + len(end)
                ends.append(count)
            elif last and not count:
                # Whether the document has tokens is known when the segments before are there.
                closes = True
        file.write(np.array([*ends, count, len(ends), closes], OFFSET).tobytes())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return count


def around_documents(
    tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger]
) -> tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]]:
    """Return the tokens before and after each document: one or none."""
    tokens = (tokenizer.begin_of_document, tokenizer.end_of_document)
    before, after = (np.array([] if token is None else [token], dtype) for token in tokens)
    return before, after


def read_segment(path: Path, dtype: np.dtype[np.unsignedinteger]) -> Segment | None:
    """Return what a segment's file holds, None where it is not there as a whole."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TRAILER * OFFSET.itemsize))
            tokens, documents, closes = (int(number) for number in np.fromfile(file, OFFSET, _TRAILER))
    except (OSError, ValueError):
        return None
    expected = tokens * dtype.itemsize + (documents + _TRAILER) * OFFSET.itemsize
    return Segment(path, dtype, tokens, documents, bool(closes)) if size == expected else None


def _encoded(blocks: Iterable[Block], encoder: Encoder) -> Iterator[tuple[NDArray[np.unsignedinteger], bool]]:
    """Yield the tokens of each block, and whether a document ends with it."""
    batch: list[Block] = []
    size = 0
    for block in blocks:
        batch.append(block)
        size += len(block.text)
        if size >= _BATCH_BYTES:
            yield from _of_batch(batch, encoder)
            batch, size = [], 0
    yield from _of_batch(batch, encoder)


def _of_batch(batch: list[Block], encoder: Encoder) -> Iterator[tuple[NDArray[np.unsignedinteger], bool]]:
    try:
        encoded = encoder.encode([block.text for block in batch])
    except SpelledTokenError as error:
        place = batch[error.text].place(error.token.encode())
        raise CorpusError(
            f"{place} has '{error.token:.60}', a special token of the tokenizer: {error.advice}"
        ) from error
    for block, tokens in zip(batch, encoded, strict=True):
        yield tokens, block.last
