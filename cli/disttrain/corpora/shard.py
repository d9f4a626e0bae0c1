"""One shard: the tokens of its segments in a row, and a record that says that they are complete."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from disttrain.corpora.segment_file import Segment, around_documents, read_segment
from disttrain_api.base import ApiModel
from disttrain_trainer.data.corpora.manifest import (
    OFFSET,
    CorpusError,
    Count,
    Sha256,
    Shard,
    Tokenizer,
    TokenType,
    read_small,
    shard_files,
)

_MAX_RECORD_BYTES = 2**16
_BUFFER_BYTES = 2**20
SAVED_BYTES = 2**28
"""Segments are removed when so many bytes of them are in the shard, so that a large shard is not on disk twice."""


class Record(ApiModel):
    """Result of a part of the sources; no tokens if it contained no text."""

    tokens: Count
    documents: Count
    tokens_sha256: Sha256
    offsets_sha256: Sha256

    def shard(self, number: int) -> Shard:
        """Return what the manifest says of it."""
        return Shard(number=number, **self.model_dump())


class Joined(ApiModel):
    """How far the segments of a shard are in its files."""

    segments: Count = 0
    tokens: Count = 0
    documents: Count = 0
    unfinished: bool = False
    """Whether the last document has tokens and did not end yet."""


@dataclass(frozen=True)
class ShardPlace:
    """Files of a shard: those of the corpus, and those that exist until it is complete."""

    number: int
    corpus: Path
    partial: Path
    segments: Path

    @property
    def tokens(self) -> Path:
        """Its tokens."""
        return self.corpus / shard_files(self.number)[0]

    @property
    def offsets(self) -> Path:
        """The offsets of its documents."""
        return self.corpus / shard_files(self.number)[1]

    @property
    def record(self) -> Path:
        """Says that it is finished."""
        return self.partial / f"shard-{self.number:06}.json"

    @property
    def joined(self) -> Path:
        """Says how many of its segments were removed, because the shard has them."""
        return self.segments / f"{self.number:06}.joined"

    def segment(self, number: int) -> Path:
        """The file of one of its segments."""
        return self.segments / f"{self.number:06}-{number:06}"


def join_segments(place: ShardPlace, count: int, token_type: TokenType, tokenizer: Tokenizer) -> Record:
    """Write the tokens of `count` segments, the offsets of their documents, and then the record; remove the segments.

    Goes on where it was stopped. Raises CorpusError for a segment that is missing, OSError where the disk is full.
    """
    written: list[Path] = []
    with _Files(place, token_type.dtype, tokenizer) as files:
        for number in range(files.now.segments, count):
            path = place.segment(number)
            if (segment := read_segment(path, token_type.dtype)) is None:
                raise CorpusError(f"{path} is gone or was cut: run the same command again")
            files.append(segment)
            written.append(path)
            if sum(path.stat().st_size for path in written) >= SAVED_BYTES:
                files.sync()
                write_file(place.joined, files.now.model_dump_json(by_alias=True).encode())
                _remove(written)
                written = []
        files.sync()
        record = files.record()
    write_file(place.record, record.model_dump_json(by_alias=True).encode())
    _remove([*written, place.joined])
    return record


class _Files:
    """Tokens and offsets of a shard, to which segments are appended."""

    def __init__(self, place: ShardPlace, dtype: np.dtype[np.unsignedinteger], tokenizer: Tokenizer) -> None:
        self.now = read_joined(place.joined)
        self._begin, self._end = around_documents(tokenizer, dtype)
        self._tokens = _HashedFile(place.tokens, self.now.tokens * dtype.itemsize)
        self._offsets = _HashedFile(
            place.offsets, (self.now.documents + 1) * OFFSET.itemsize if self.now.segments else 0
        )
        if not self.now.segments:
            self._offsets.write(np.array([0], OFFSET).tobytes())

    def __enter__(self) -> Self:
        return self

    def append(self, segment: Segment) -> None:
        """Write what a segment holds. Raises CorpusError."""
        now = self.now
        total, documents = now.tokens, now.documents
        if closed := segment.closes and now.unfinished:
            self._tokens.write(self._end.tobytes())
            total, documents = total + len(self._end), documents + 1
            self._offsets.write(np.array([total], OFFSET).tobytes())
        if segment.tokens and (closed or not now.unfinished):
            self._tokens.write(self._begin.tobytes())
            total += len(self._begin)
        with segment.path.open("rb") as file:
            ends = segment.ends(file)
            self._offsets.write((ends + np.array(total, OFFSET)).tobytes())
            for block in segment.content(file):
                self._tokens.write(block)
        since_an_end = segment.tokens - (int(ends[-1]) if len(ends) else 0)
        self.now = Joined(
            segments=now.segments + 1,
            tokens=total + segment.tokens,
            documents=documents + segment.documents,
            unfinished=since_an_end > 0 or (now.unfinished and not closed and not len(ends)),
        )

    def sync(self) -> None:
        """Return when what was written survives a power cut."""
        self._tokens.sync()
        self._offsets.sync()

    def record(self) -> Record:
        """Return what the files hold."""
        return Record(
            tokens=self.now.tokens,
            documents=self.now.documents,
            tokens_sha256=self._tokens.sha256,
            offsets_sha256=self._offsets.sha256,
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._tokens.close()
        self._offsets.close()


def read_joined(path: Path) -> Joined:
    """Return how far a shard's segments were joined; not at all where nothing says so."""
    return Joined.model_validate_json(read_small(path, _MAX_RECORD_BYTES)) if path.exists() else Joined()


def read_record(place: ShardPlace, token_type: TokenType) -> Record | None:
    """Return the record of a shard that was completed and whose files are there, None where one is not so."""
    if not place.record.exists():
        return None
    try:
        record = Record.model_validate_json(read_small(place.record, _MAX_RECORD_BYTES))
        sizes = [file.stat().st_size for file in (place.tokens, place.offsets)]
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


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


class _HashedFile:
    """A file that is written from its beginning to its end, and the SHA-256 of what it holds."""

    def __init__(self, path: Path, kept: int) -> None:
        """kept: bytes that are there already. Raises CorpusError where they are not."""
        self._digest = hashlib.sha256()
        self._file = path.open("r+b" if kept else "wb", buffering=_BUFFER_BYTES)
        left = kept
        while left > 0:
            if not (block := self._file.read(min(left, _BUFFER_BYTES))):
                self._file.close()
                raise CorpusError(f"{path} has fewer bytes than were written; remove {path.parent.parent}")
            self._digest.update(block)
            left -= len(block)
        self._file.seek(kept)
        self._file.truncate()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, content: bytes) -> None:
        self._digest.update(content)
        self._file.write(content)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
