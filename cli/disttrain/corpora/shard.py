"""One shard: the tokens of a part of the sources, and a record that says that they are complete."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from disttrain.corpora.documents import BLOCK_BYTES, Block
from disttrain.corpora.encoders import Encoder
from disttrain_api.base import ApiModel
from disttrain_trainer.data.corpora.manifest import (
    OFFSET,
    CorpusError,
    Count,
    Sha256,
    Shard,
    TokenType,
    read_small,
)

_MAX_RECORD_BYTES = 2**16
_BATCH_BYTES = 2**20
"""Texts of so many bytes are encoded at once, or one longer one."""


class Record(ApiModel):
    """Result of a part of the sources; no tokens if it contained no text."""

    tokens: Count
    documents: Count
    tokens_sha256: Sha256
    offsets_sha256: Sha256

    def shard(self, number: int) -> Shard:
        """Return what the manifest says of it."""
        return Shard(number=number, **self.model_dump())


def write_shard(
    record_path: Path, shard: tuple[Path, Path], blocks: Iterable[Block], encoder: Encoder, end_of_document: int | None
) -> Record:
    """Write the tokens of `blocks`, the offsets of their documents (to `shard`), and then the record; documents
    without any token are left out.

    Raises CorpusError for bad input, OSError where the disk is full.
    """
    dtype = TokenType.holding(encoder.vocabulary).dtype
    end = np.array([] if end_of_document is None else [end_of_document], dtype)
    with _HashedFile(shard[0]) as tokens, _HashedFile(shard[1]) as offsets:
        start = count = documents = 0
        for found, last in _encoded(blocks, encoder):
            tokens.write(found.astype(dtype))
            count += len(found)
            if last and count > start:
                tokens.write(end)
                offsets.write(np.array([start], OFFSET))
                count += len(end)
                documents, start = documents + 1, count
        offsets.write(np.array([count], OFFSET))
    record = Record(tokens=count, documents=documents, tokens_sha256=tokens.sha256, offsets_sha256=offsets.sha256)
    write_file(record_path, record.model_dump_json(by_alias=True).encode())
    return record


def read_record(path: Path, shard: tuple[Path, Path], token_type: TokenType) -> Record | None:
    """Return the record of a shard that was completed and whose files are there, None where one is not so."""
    if not path.exists():
        return None
    try:
        record = Record.model_validate_json(read_small(path, _MAX_RECORD_BYTES))
        sizes = [file.stat().st_size for file in shard]
    except (CorpusError, ValueError, OSError):
        return None
    expected = [record.tokens * token_type.dtype.itemsize, (record.documents + 1) * OFFSET.itemsize]
    return record if sizes == expected else None


def write_file(path: Path, content: bytes) -> None:
    """Write a file that is never seen half written, also after a power cut. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


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
    for block, tokens in zip(batch, encoder.encode([block.text for block in batch]), strict=True):
        yield tokens, block.last


class _HashedFile:
    """A file that is written from its beginning to its end, and its SHA-256 when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path, self._digest = path, hashlib.sha256()
        self.sha256 = ""

    def __enter__(self) -> Self:
        self._file = self._path.open("wb", buffering=BLOCK_BYTES)
        return self

    def write(self, numbers: NDArray[np.generic]) -> None:
        content = numbers.tobytes()
        self._digest.update(content)
        self._file.write(content)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._file as file:
            if error is None:
                file.flush()
                os.fsync(file.fileno())
        self.sha256 = self._digest.hexdigest()
