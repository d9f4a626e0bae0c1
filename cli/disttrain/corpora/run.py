"""Which segments and shards are still to be written, and how far the preparation is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from disttrain.corpora.documents import blocks_of
from disttrain.corpora.encoders import Encoder, build_encoder
from disttrain.corpora.pool import run_jobs
from disttrain.corpora.segment_file import read_segment, write_segment
from disttrain.corpora.segments import cut_into_segments
from disttrain.corpora.settings import SpecialTokens
from disttrain.corpora.shard import Record, ShardPlace, join_segments, read_joined, read_record
from disttrain.corpora.sources import Piece
from disttrain_trainer.data.corpora.manifest import TOKENIZER_FILE, Tokenizer, TokenType


@dataclass(frozen=True)
class Progress:
    """How far a preparation is."""

    source_bytes: int
    """Bytes of the source files whose tokens are written."""
    total_bytes: int
    tokens: int
    shards: int
    total_shards: int


@dataclass(frozen=True)
class Task:
    """What all processes need to know."""

    corpus: Path
    partial: Path
    segments: Path
    tokenizer: Tokenizer
    field: str
    segment_bytes: int
    special_tokens: SpecialTokens
    utf8: bool
    """Whether texts must be UTF-8."""

    @property
    def token_type(self) -> TokenType:
        """How a token is stored."""
        return TokenType.holding(self.tokenizer.vocabulary)

    def place(self, shard: int) -> ShardPlace:
        """Return where a shard's files are."""
        return ShardPlace(shard, self.corpus, self.partial, self.segments)


@dataclass(frozen=True)
class _Encode:
    """A segment to be written."""

    task: Task
    shard: int
    number: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class _Join:
    """A shard whose segments are all there."""

    task: Task
    shard: int
    segments: int


@dataclass
class _Shard:
    """A shard whose segments are being written."""

    source_bytes: int = 0
    tokens: int = 0
    segments: int = 0
    running: int = 0
    all_begun: bool = False


class Run:
    """The parts of the sources on their way to shards. What is there already is kept."""

    def __init__(self, parts: Sequence[tuple[Piece, ...]], task: Task) -> None:
        self._parts, self._task = parts, task
        self._sizes = [sum(piece.size for piece in part) for part in parts]
        self._records: dict[int, Record] = {}
        for shard in range(len(parts)):
            if (record := read_record(task.place(shard), task.token_type)) is not None:
                self._records[shard] = record
        self._begun: dict[int, _Shard] = {}
        self._complete: deque[_Join] = deque()
        self._segments = self._missing_segments()

    def write(self, workers: int, on_progress: Callable[[Progress], None]) -> list[Record]:
        """Write what is missing, and return the records of all shards in order. Raises CorpusError, OSError."""
        on_progress(self._progress())
        if len(self._parts) == 1 and sum(self._sizes) <= self._task.segment_bytes:
            # It starts faster than a process.
            workers = 1
        for job, result in run_jobs(_do, self._following, workers):
            if isinstance(job, _Encode):
                assert isinstance(result, int)
                self._encoded(job, result)
            else:
                assert isinstance(result, Record)
                self._records[job.shard] = result
                del self._begun[job.shard]
            on_progress(self._progress())
        return [self._records[shard] for shard in range(len(self._parts))]

    def _following(self) -> _Encode | _Join | None:
        # Shards first: their segments need the disk.
        if not self._complete and (segment := next(self._segments, None)) is not None:
            return segment
        return self._complete.popleft() if self._complete else None

    def _missing_segments(self) -> Iterator[_Encode]:
        task = self._task
        for shard, part in enumerate(self._parts):
            if shard in self._records:
                continue
            place, state = task.place(shard), _Shard()
            self._begun[shard] = state
            joined = read_joined(place.joined)
            state.tokens = joined.tokens
            for number, pieces in enumerate(cut_into_segments(part, task.segment_bytes, task.utf8)):
                state.segments += 1
                found = read_segment(place.segment(number), task.token_type.dtype)
                if number < joined.segments or found is not None:
                    state.source_bytes += sum(piece.size for piece in pieces)
                    state.tokens += found.tokens if found is not None and number >= joined.segments else 0
                    continue
                state.running += 1
                yield _Encode(task, shard, number, pieces)
            state.all_begun = True
            self._join_if_complete(shard)

    def _encoded(self, job: _Encode, tokens: int) -> None:
        state = self._begun[job.shard]
        state.running -= 1
        state.tokens += tokens
        state.source_bytes += sum(piece.size for piece in job.pieces)
        self._join_if_complete(job.shard)

    def _join_if_complete(self, shard: int) -> None:
        state = self._begun[shard]
        if state.all_begun and not state.running:
            self._complete.append(_Join(self._task, shard, state.segments))

    def _progress(self) -> Progress:
        begun = self._begun.values()
        return Progress(
            source_bytes=sum(self._sizes[shard] for shard in self._records) + sum(one.source_bytes for one in begun),
            total_bytes=sum(self._sizes),
            tokens=sum(one.tokens for one in self._records.values()) + sum(one.tokens for one in begun),
            shards=len(self._records),
            total_shards=len(self._parts),
        )


def _do(job: _Encode | _Join) -> int | Record:
    """Write a segment and return its tokens, or a shard and return its record. Raises CorpusError, OSError."""
    task = job.task
    place = task.place(job.shard)
    if isinstance(job, _Join):
        return join_segments(place, job.segments, task.token_type, task.tokenizer)
    encoder = _encoder(task.corpus / TOKENIZER_FILE, task.tokenizer.kind, task.tokenizer.sha256, task.special_tokens)
    blocks = (block for piece in job.pieces for block in blocks_of(piece, task.field, encoder.utf8))
    return write_segment(place.segment(job.number), blocks, encoder, task.token_type.dtype, task.tokenizer)


@lru_cache(maxsize=1)
def _encoder(path: Path, kind: str, sha256: str | None, special_tokens: SpecialTokens) -> Encoder:
    """Return the encoder of a tokenizer's copy with this digest, which is built once per process."""
    return build_encoder(str(path), kind, None if sha256 is None else path.read_bytes(), special_tokens)
