"""From source files to a corpus that is there as a whole or not at all.

In `OUTPUT.partial` lie the plan, a record of each finished shard, the segments of others, and the folder that a rename
makes the corpus. What was killed goes on from these: which part of the sources a shard and a segment hold depends on
the sources and settings alone (sources.py, segments.py), so any process writes the same bytes, at any time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from disttrain.corpora.binaries import require_text
from disttrain.corpora.documents import BLOCK_BYTES
from disttrain.corpora.encoders import build_encoder, describe_tokenizer, kind_of, read_tokenizer
from disttrain.corpora.run import Progress, Run, Task
from disttrain.corpora.settings import Settings, SpecialTokens
from disttrain.corpora.shard import Record, write_file
from disttrain.corpora.sources import Source, cut_into_parts, find_sources
from disttrain_trainer.data.corpora.manifest import (
    FORMAT,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    CorpusError,
    CorpusManifest,
    Tokenizer,
    TokenType,
    read_small,
    shard_files,
)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_PLAN_BYTES = 2**16


@dataclass(frozen=True)
class Work:
    """Folder of a corpus until it is complete."""

    partial: Path

    @property
    def plan(self) -> Path:
        """Its sources and settings: a resumed run must have the same."""
        return self.partial / "plan"

    @property
    def lock(self) -> Path:
        """Held by the process that prepares."""
        return self.partial / "lock"

    def segments(self, segment_bytes: int) -> Path:
        """Folder of segments of this size: others end elsewhere."""
        return self.partial / f"segments-{segment_bytes}"

    @property
    def corpus(self) -> Path:
        """The folder that a rename makes the corpus."""
        return self.partial / "corpus"


def prepare(settings: Settings, on_progress: Callable[[Progress], None] = lambda _: None) -> CorpusManifest:
    """Write the corpus, or go on with it where it was stopped, and return its manifest.

    Raises CorpusError, whose message is for the user: bad input with its file and line, a full disk, a folder that is
    taken. What was complete then stays, and the same call goes on from there.
    """
    if os.path.lexists(settings.output):
        raise CorpusError(f"{settings.output} exists: name another folder, or remove it")
    content = read_tokenizer(settings)
    encoder = build_encoder(settings.tokenizer, kind_of(settings), content, settings.special_tokens)
    tokenizer = describe_tokenizer(settings, encoder, content)
    sources = find_sources(settings)
    for source in sources:
        require_text(source)
    parts = cut_into_parts(sources, settings.part_bytes)
    work = Work(settings.partial)
    with _sentences(settings), _owned(work):
        _begin(work, settings, sources, tokenizer, content)
        segments = work.segments(settings.segment_bytes)
        segments.mkdir(exist_ok=True)
        task = Task(
            work.corpus,
            work.partial,
            segments,
            tokenizer,
            settings.field,
            settings.segment_bytes,
            settings.special_tokens,
            encoder.utf8,
        )
        records = Run(parts, task).write(settings.workers, on_progress)
        manifest = _manifest(sources, tokenizer, records)
        _commit(work, settings.output, manifest)
    return manifest


def _begin(
    work: Work, settings: Settings, sources: Sequence[Source], tokenizer: Tokenizer, content: bytes | None
) -> None:
    """Raises CorpusError where what lies in `OUTPUT.partial` was begun with other sources or settings."""
    own = _plan(settings, sources, tokenizer, settings.special_tokens)
    # What was written before such a token was refused has none, and is the same in any case.
    fitting = {own, _plan(settings, sources, tokenizer, SpecialTokens.REFUSE)}
    if work.plan.exists() and read_small(work.plan, _MAX_PLAN_BYTES) not in fitting:
        raise CorpusError(
            f"{work.partial} was started with other sources, another tokenizer or other options: use those, or remove"
            " it"
        )
    work.corpus.mkdir(exist_ok=True)
    if content is not None:
        write_file(work.corpus / TOKENIZER_FILE, content)
    write_file(work.plan, own)


def _plan(settings: Settings, sources: Sequence[Source], tokenizer: Tokenizer, special_tokens: SpecialTokens) -> bytes:
    """Return a digest of all that the tokens depend on."""
    options: dict[str, object] = {
        "sources": [[str(source.path.absolute()), source.size, source.modified] for source in sources],
        "tokenizer": tokenizer.model_dump(mode="json"),
        "settings": [settings.field, settings.part_bytes, BLOCK_BYTES],
    }
    # Without a word about it where it makes no difference, or is what versions before did.
    if tokenizer.kind == "tokenizers" and special_tokens is not SpecialTokens.ENCODE:
        options["special_tokens"] = special_tokens
    return hashlib.sha256(json.dumps(options).encode()).hexdigest().encode()


def _manifest(sources: Sequence[Source], tokenizer: Tokenizer, records: Sequence[Record]) -> CorpusManifest:
    shards = [record.shard(number) for number, record in enumerate(records) if record.tokens > 0]
    if not shards:
        raise CorpusError(f"{len(sources)} files hold no text: there is nothing to prepare")
    blank = CorpusManifest(
        format=FORMAT,
        token_type=TokenType.holding(tokenizer.vocabulary),
        tokenizer=tokenizer,
        source_files=len(sources),
        source_bytes=sum(source.size for source in sources),
        shards=shards,
    )
    return CorpusManifest.model_validate_json(blank.text())


def _commit(work: Work, output: Path, manifest: CorpusManifest) -> None:
    """Make the folder the corpus, and remove what was needed to go on."""
    write_file(work.corpus / MANIFEST_FILE, manifest.text().encode())
    kept = {MANIFEST_FILE, TOKENIZER_FILE, *(name for shard in manifest.shards for name in shard_files(shard.number))}
    for path in work.corpus.iterdir():
        if path.name not in kept:
            path.unlink()
    _sync(work.corpus)
    work.corpus.rename(output)
    _sync(output.absolute().parent)
    shutil.rmtree(work.partial, ignore_errors=True)


@contextmanager
def _owned(work: Work) -> Iterator[None]:
    """The folder is this process's alone. Raises CorpusError where another one prepares it."""
    work.partial.mkdir(parents=True, exist_ok=True)
    with work.lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CorpusError(f"another process prepares {work.partial}") from error
        yield


@contextmanager
def _sentences(settings: Settings) -> Iterator[None]:
    """Errors of the file system become sentences."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise CorpusError(
                f"no room in {settings.output.absolute().parent} for the corpus: free some and run the same command"
                f" again; what is finished stays in {settings.partial}"
            ) from error
        place = error.filename or settings.partial
        raise CorpusError(f"{place} cannot be written: {error.strerror or error}") from error


def _sync(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
