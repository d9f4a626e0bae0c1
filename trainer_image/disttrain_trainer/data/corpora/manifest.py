"""`manifest.json` of a corpus: its shards with size and SHA-256 (FIPS 180-4), its tokens' type, its tokenizer."""

from __future__ import annotations

import hashlib
import os
import stat
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, ValidationError

from disttrain_api.base import ApiModel
from disttrain_api.errors import DisttrainError

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer"
"""A copy of the tokenizer's file, whatever its kind; there is none for bytes."""
FORMAT = "disttrain-corpus/1"
BYTES = "bytes"
OFFSET = np.dtype("<u8")
"""Type of a document's first token within its shard."""

MAX_MANIFEST_BYTES = 2**26
MAX_SHARDS = 100_000
MAX_TOKENS = 2**48
"""The most tokens that a corpus may have: sums then stay far below what 64 bits hold."""
MAX_VOCABULARY = 2**24

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS)]


class CorpusError(DisttrainError):
    """A corpus that cannot be used; the message names the file, what was found in it and what was expected."""


class TokenType(StrEnum):
    """How a token is stored: little-endian, unsigned."""

    UINT16 = "uint16"
    UINT32 = "uint32"

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """numpy's type."""
        return np.dtype("<u2" if self is TokenType.UINT16 else "<u4")

    @classmethod
    def holding(cls, vocabulary: int) -> TokenType:
        """Return the smallest type for tokens below `vocabulary`."""
        return cls.UINT16 if vocabulary <= 2**16 else cls.UINT32


class Shard(ApiModel):
    """`shard-N.tokens` holds the tokens, `shard-N.offsets` the first token of each document and the number of all."""

    number: Annotated[int, Field(strict=True, ge=0, lt=MAX_SHARDS)]
    """N of the file names. Numbers rise, and may have gaps where a part of the sources held no text."""
    tokens: Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]
    documents: Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]
    tokens_sha256: Sha256
    offsets_sha256: Sha256


class Tokenizer(ApiModel):
    """The tokenizer of a corpus."""

    kind: Annotated[str, Field(min_length=1, max_length=100)]
    """bytes, tokenizers or sentencepiece."""
    sha256: Sha256 | None
    """Digest of the tokenizer's file. None: bytes are the tokens."""
    vocabulary: Annotated[int, Field(strict=True, ge=1, le=MAX_VOCABULARY)]
    """All tokens are below."""
    end_of_document: Annotated[int, Field(strict=True, ge=0, le=MAX_VOCABULARY)] | None
    """Token after each document; None where nothing is between two."""
    begin_of_document: Annotated[int, Field(strict=True, ge=0, le=MAX_VOCABULARY)] | None = None
    """Token before each document."""


class CorpusManifest(ApiModel):
    """Content of the file. Nothing in it says when, where or by how many processes it was made."""

    format: str
    token_type: TokenType
    tokenizer: Tokenizer
    source_files: Count
    source_bytes: Count
    shards: Annotated[list[Shard], Field(min_length=1, max_length=MAX_SHARDS)]
    fingerprint: str = ""
    """SHA-256 of this file's text with an empty string in this place: two corpora are the same where it is."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Return the number of documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    def text(self) -> str:
        """Return the file's one form, fingerprint filled in."""
        blank = self.model_copy(update={"fingerprint": ""})
        digest = hashlib.sha256(_json(blank).encode()).hexdigest()
        return _json(self.model_copy(update={"fingerprint": digest}))


def shard_files(number: int) -> tuple[str, str]:
    """Return the names of a shard's tokens and of its documents' offsets."""
    return f"shard-{number:06}.tokens", f"shard-{number:06}.offsets"


def read_manifest(folder: Path) -> CorpusManifest:
    """Return what the folder says it holds. Raises CorpusError where it says nothing that can be relied on."""
    path = folder / MANIFEST_FILE
    if not folder.is_dir():
        raise CorpusError(f"{folder} is no folder (from {Path.cwd()}); `disttrain data prepare` makes one")
    if not os.path.lexists(path):
        raise CorpusError(f"{folder} is no corpus: it has no {MANIFEST_FILE}; `disttrain data prepare` writes one")
    text = read_small(path, MAX_MANIFEST_BYTES)
    try:
        manifest = CorpusManifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "its text"
        raise CorpusError(f"{path} is no manifest of a corpus: {where}: {first['msg']:.200}") from error
    if manifest.format != FORMAT:
        raise CorpusError(f"{path}: format is {manifest.format[:50]!r}, expected {FORMAT!r}")
    if manifest.text().encode() != text:
        raise CorpusError(f"{path} is not as it was written; prepare the corpus again")
    if any(one.number >= other.number for one, other in pairwise(manifest.shards)):
        raise CorpusError(f"{path}: the numbers of its shards do not rise")
    if manifest.tokens > MAX_TOKENS:
        raise CorpusError(f"{path}: {manifest.tokens} tokens, expected at most {MAX_TOKENS}")
    if TokenType.holding(manifest.tokenizer.vocabulary) is not manifest.token_type:
        raise CorpusError(f"{path}: {manifest.token_type} conflicts with {manifest.tokenizer.vocabulary} tokens")
    return manifest


def open_regular(path: Path) -> int:
    """Return a descriptor to read a file. Raises CorpusError for a link, what is no file and what is missing."""
    try:
        # What is no file, such as a named pipe, must not be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise CorpusError(f"{path} cannot be read: {reason}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorpusError(f"{path} cannot be read: it is no regular file")
    return descriptor


def read_small(path: Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises CorpusError."""
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise CorpusError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise CorpusError(f"{path} has more than {most} bytes")
    return content


def _json(manifest: CorpusManifest) -> str:
    # A corpus that was written before there was such a token keeps its fingerprint.
    absent = {"tokenizer": {"begin_of_document"}} if manifest.tokenizer.begin_of_document is None else None
    return manifest.model_dump_json(by_alias=True, indent=1, exclude=absent) + "\n"
