"""Content of a corpus, and its verification."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from disttrain_trainer.data.corpora.corpus import shards_of
from disttrain_trainer.data.corpora.manifest import (
    OFFSET,
    TOKENIZER_FILE,
    CorpusError,
    CorpusManifest,
    Shard,
    open_regular,
    read_manifest,
    read_small,
    shard_files,
)

_BLOCK_BYTES = 2**22
_MAX_TOKENIZER_BYTES = 2**28


@dataclass(frozen=True)
class Figures:
    """Output of `disttrain data inspect` for a corpus."""

    tokens: int
    documents: int
    shards: int
    bytes: int
    """Size of the files that hold tokens and offsets."""
    token_type: str
    vocabulary: int
    tokenizer: str
    end_of_document: int | None
    begin_of_document: int | None
    source_files: int
    source_bytes: int
    fingerprint: str


def inspect(folder: Path) -> Figures:
    """Return what the manifest says, after a look at the files' sizes. Raises CorpusError."""
    manifest = read_manifest(folder)
    shards_of(folder, manifest)
    sizes = (
        manifest.token_type.dtype.itemsize * manifest.tokens,
        OFFSET.itemsize * (manifest.documents + len(manifest.shards)),
    )
    digest = manifest.tokenizer.sha256
    return Figures(
        tokens=manifest.tokens,
        documents=manifest.documents,
        shards=len(manifest.shards),
        bytes=sum(sizes),
        token_type=manifest.token_type,
        vocabulary=manifest.tokenizer.vocabulary,
        tokenizer=manifest.tokenizer.kind if digest is None else f"{manifest.tokenizer.kind} sha256:{digest}",
        end_of_document=manifest.tokenizer.end_of_document,
        begin_of_document=manifest.tokenizer.begin_of_document,
        source_files=manifest.source_files,
        source_bytes=manifest.source_bytes,
        fingerprint=manifest.fingerprint,
    )


def verify(folder: Path, on_progress: Callable[[int, int], None] = lambda done, total: None) -> CorpusManifest:
    """Read every byte of a corpus. Raises CorpusError for the first file that is not as it was written.

    on_progress: called with the shards that are sound, and the number of all.
    """
    manifest = read_manifest(folder)
    shards_of(folder, manifest)
    digest = manifest.tokenizer.sha256
    if digest is not None:
        content = read_small(folder / TOKENIZER_FILE, _MAX_TOKENIZER_BYTES)
        _require_digest(folder / TOKENIZER_FILE, hashlib.sha256(content).hexdigest(), digest)
    for done, shard in enumerate(manifest.shards):
        on_progress(done, len(manifest.shards))
        _verify_shard(folder, manifest, shard)
    on_progress(len(manifest.shards), len(manifest.shards))
    return manifest


def _verify_shard(folder: Path, manifest: CorpusManifest, shard: Shard) -> None:
    tokens, offsets = (folder / name for name in shard_files(shard.number))
    largest, _ = _read_through(tokens, manifest.token_type.dtype, shard.tokens_sha256)
    if largest >= manifest.tokenizer.vocabulary:
        raise CorpusError(f"{tokens} holds token {largest}, expected tokens below {manifest.tokenizer.vocabulary}")
    last, rising = _read_through(offsets, OFFSET, shard.offsets_sha256)
    if not rising or last != shard.tokens:
        raise CorpusError(f"{offsets}: its numbers do not rise from 0 to {shard.tokens}, which is the shard's end")


def _read_through(path: Path, dtype: np.dtype[np.unsignedinteger], sha256: str) -> tuple[int, bool]:
    """Return a file's largest number, and whether its numbers rise from 0. Raises CorpusError for another digest."""
    digest, largest, previous, rising = hashlib.sha256(), -1, -1, True
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                numbers = np.frombuffer(block[: len(block) // dtype.itemsize * dtype.itemsize], dtype)
                rising = rising and (previous >= 0 or int(numbers[0]) == 0) and int(numbers[0]) > previous
                rising = rising and bool(np.all(numbers[1:] > numbers[:-1]))
                largest, previous = max(largest, int(numbers.max())), int(numbers[-1])
        except OSError as error:
            raise CorpusError(f"{path} cannot be read: {error.strerror}") from error
    _require_digest(path, digest.hexdigest(), sha256)
    return largest, rising


def _require_digest(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise CorpusError(f"{path} has other bytes than were written; copy it again, or prepare the corpus again")
