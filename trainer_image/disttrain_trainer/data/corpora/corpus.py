"""A prepared corpus: its manifest, checked against the sizes of its files, and its documents."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from disttrain_trainer.data.corpora.files import NumberFiles
from disttrain_trainer.data.corpora.manifest import (
    OFFSET,
    CorpusError,
    CorpusManifest,
    open_regular,
    read_manifest,
    shard_files,
)


class Documents(Protocol):
    """Offsets of the documents of a shard."""

    @property
    def count(self) -> int:
        """Return the number of documents."""
        ...

    def start(self, document: int, files: NumberFiles) -> int:
        """Return the first token of a document, or the number of all tokens after the last. Raises CorpusError."""
        ...


@dataclass(frozen=True)
class OffsetFile:
    """A file with a number for each document, and one for the end."""

    path: Path
    count: int
    tokens: int

    def start(self, document: int, files: NumberFiles) -> int:
        """Return the first token of a document, or the number of all tokens after the last. Raises CorpusError."""
        found = int(files.read(self.path, OFFSET, document, 1)[0])
        if found > self.tokens:
            raise CorpusError(
                f"{self.path}: document {document} begins at token {found} of {self.tokens}; the file is damaged"
            )
        return found


@dataclass(frozen=True)
class ShardFile:
    """Tokens of a shard, and the offsets of its documents."""

    path: Path
    dtype: np.dtype[np.integer]
    tokens: int
    documents: Documents


@dataclass(frozen=True)
class Corpus:
    """Shards in order; `fingerprint` tells corpora apart, and all tokens are below `vocabulary`."""

    path: Path
    fingerprint: str
    tokenizer: str | None
    """Tells tokenizers apart; None where nobody knows."""
    vocabulary: int
    shards: tuple[ShardFile, ...]

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)


def open_corpus(folder: Path) -> Corpus:
    """Return the corpus in `folder`, whose files have the sizes that its manifest says. Raises CorpusError."""
    manifest = read_manifest(folder)
    tokenizer, shards = manifest.tokenizer, tuple(shards_of(folder, manifest))
    return Corpus(folder, manifest.fingerprint, tokenizer.sha256 or tokenizer.kind, tokenizer.vocabulary, shards)


def shards_of(folder: Path, manifest: CorpusManifest) -> list[ShardFile]:
    """Return the shards in order. Raises CorpusError where a file has another size than the manifest says."""
    found = []
    for shard in manifest.shards:
        tokens, offsets = (folder / name for name in shard_files(shard.number))
        _require_size(tokens, shard.tokens, manifest.token_type.dtype)
        _require_size(offsets, shard.documents + 1, OFFSET)
        documents = OffsetFile(offsets, shard.documents, shard.tokens)
        found.append(ShardFile(tokens, manifest.token_type.dtype, shard.tokens, documents))
    return found


def _require_size(path: Path, count: int, dtype: np.dtype[np.generic]) -> None:
    descriptor = open_regular(path)
    size = os.fstat(descriptor).st_size
    os.close(descriptor)
    if size != count * dtype.itemsize:
        raise CorpusError(
            f"{path} has {size} bytes, expected {count * dtype.itemsize} ({count} numbers of {dtype.itemsize} bytes); "
            "copy it again, or prepare the corpus again"
        )
