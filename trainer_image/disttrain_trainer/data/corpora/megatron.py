"""Megatron-LM's indexed data sets, as they are: `NAME.bin` holds the tokens of all sequences, `NAME.idx` where each
begins.

Two headers are known, that of Megatron-LM's and Megatron-Core's memory-mapped data sets (`MMIDIDX`) and the older one,
fairseq's (`TNTIDX`); sizes are compared with the files' before a table is read.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from disttrain_trainer.data.corpora.corpus import Corpus, ShardFile
from disttrain_trainer.data.corpora.files import NumberFiles
from disttrain_trainer.data.corpora.manifest import MAX_TOKENS, CorpusError, open_regular

_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""numpy's type of each integer type, by Megatron-LM's number; its other numbers are floating-point types."""
_MAPPED = (b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ"))
"""Version, type, sequences, documents; then int32 lengths, int64 places in bytes, int64 documents."""
_OLDER = (b"TNTIDX\x00\x00", struct.Struct("<8sQQQQQQ"))
"""Version, type, its bytes, sequences, sizes, documents; then int64 dimensions, places in numbers, sizes, documents."""
_BLOCK_BYTES = 2**22
_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Parts of the tokens that tell data sets with equal indexes apart: to read all of them takes too long."""
_WIDE = np.dtype("<i8")


@dataclass(frozen=True)
class IndexDocuments:
    """Offsets of documents, read from the index on demand."""

    index: Path
    count: int
    first_document: int
    """Bytes before the table of documents, whose entries are numbers of sequences."""
    first_place: int
    """Bytes before the table of places."""
    place_bytes: int
    """Bytes that a place counts."""
    token_bytes: int
    sequences: int
    tokens: int

    def start(self, document: int, files: NumberFiles) -> int:
        """Return the first token of a document, or the number of all after the last. Raises CorpusError."""
        sequence = _number(self.index, self.first_document, document, files)
        if not 0 <= sequence <= self.sequences:
            raise CorpusError(f"{self.index}: document {document} begins with sequence {sequence} of {self.sequences}")
        if sequence == self.sequences:
            return self.tokens
        found = _number(self.index, self.first_place, sequence, files) * self.place_bytes // self.token_bytes
        if not 0 <= found <= self.tokens:
            raise CorpusError(f"{self.index}: sequence {sequence} begins at token {found} of {self.tokens}")
        return found


@dataclass(frozen=True)
class _Index:
    """Content of a header, and the places of its tables."""

    dtype: np.dtype[np.integer]
    sequences: int
    documents: int
    """Entries of the table, whose last one is the end."""
    first_place: int
    first_document: int
    place_bytes: int
    size: int
    """Bytes that the file must have."""


def open_indexed(path: Path, vocabulary: int) -> Corpus:
    """Return the data set whose `.bin` or `.idx` is `path`; the other one lies beside it.

    vocabulary: all tokens are below; the files do not say. Raises CorpusError.
    """
    index, tokens = path.with_suffix(".idx"), path.with_suffix(".bin")
    size, digest, head = _examine(index)
    found = _parse(index, head)
    if size != found.size:
        raise CorpusError(f"{index} has {size} bytes, expected {found.size} with {found.sequences} sequences")
    bytes_of_tokens, sample = _sampled(tokens)
    width = found.dtype.itemsize
    if bytes_of_tokens % width or not 0 < bytes_of_tokens // width <= MAX_TOKENS:
        raise CorpusError(f"{tokens} has {bytes_of_tokens} bytes, expected 1 to {MAX_TOKENS} numbers of {width} bytes")
    count = bytes_of_tokens // width
    documents = IndexDocuments(
        index=index,
        count=found.documents - 1,
        first_document=found.first_document,
        first_place=found.first_place,
        place_bytes=found.place_bytes,
        token_bytes=width,
        sequences=found.sequences,
        tokens=count,
    )
    files = NumberFiles()
    last = _number(index, found.first_place, found.sequences - 1, files) * found.place_bytes
    if not 0 <= last <= bytes_of_tokens or documents.start(0, files) != 0:
        raise CorpusError(f"{index} is not the index of {tokens}, which has {bytes_of_tokens} bytes")
    fingerprint = hashlib.sha256(f"{digest} {bytes_of_tokens} {sample}".encode()).hexdigest()
    shard = ShardFile(tokens, found.dtype, count, documents)
    return Corpus(path, fingerprint, None, vocabulary, (shard,))


def _parse(index: Path, head: bytes) -> _Index:
    for (magic, header), tables in ((_MAPPED, _mapped), (_OLDER, _older)):
        if head.startswith(magic):
            if len(head) < header.size:
                break
            version, code, *counts = header.unpack_from(head)[1:]
            if version != 1 or code not in _DTYPES:
                raise CorpusError(
                    f"{index}: version {version} with numbers of type {code}, expected version 1 with integers "
                    f"({', '.join(map(str, _DTYPES))})"
                )
            found = tables(np.dtype(_DTYPES[code]), *counts)
            if found.sequences < 1 or found.documents < 2:
                raise CorpusError(f"{index} has {found.sequences} sequences and {found.documents - 1} documents")
            return found
    raise CorpusError(f"{index} is no index of Megatron-LM: it begins with {head[:9]!r}")


def _mapped(dtype: np.dtype[np.integer], sequences: int, documents: int) -> _Index:
    places = _MAPPED[1].size + 4 * sequences
    table = places + 8 * sequences
    return _Index(dtype, sequences, documents, places, table, 1, table + 8 * documents)


def _older(dtype: np.dtype[np.integer], _: int, sequences: int, sizes: int, documents: int) -> _Index:
    places = _OLDER[1].size + 8 * (sequences + 1)
    table = places + 8 * (sequences + 1) + 8 * sizes
    return _Index(dtype, sequences, documents, places, table, dtype.itemsize, table + 8 * documents)


def _number(index: Path, first: int, at: int, files: NumberFiles) -> int:
    """Return a number of a table that begins after `first` bytes."""
    return int(files.read_at(index, _WIDE, first + at * _WIDE.itemsize, 1)[0])


def _examine(path: Path) -> tuple[int, str, bytes]:
    """Return size, SHA-256 and first bytes of a file, of which little is held in memory."""
    digest, size, head = hashlib.sha256(), 0, b""
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            while block := file.read(_BLOCK_BYTES):
                head = head or block[:64]
                digest.update(block)
                size += len(block)
        except OSError as error:
            raise CorpusError(f"{path} cannot be read: {error.strerror}") from error
    return size, digest.hexdigest(), head


def _sampled(path: Path) -> tuple[int, str]:
    """Return the size of a file, and SHA-256 of parts of it that lie as far from each other."""
    descriptor, digest = open_regular(path), hashlib.sha256()
    try:
        size = os.fstat(descriptor).st_size
        last = max(0, size - _SAMPLE_BYTES)
        for number in range(_SAMPLES):
            digest.update(os.pread(descriptor, _SAMPLE_BYTES, last * number // (_SAMPLES - 1)))
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()
