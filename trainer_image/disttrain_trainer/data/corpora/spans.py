"""Which tokens are trained on and which are held out: a pure function of the corpus and the fraction.

The end of each shard is held out, so that what is held out is drawn from all sources alike, and no table of chosen
documents must be kept. The cut lies at the beginning of a document where one is near.
"""

from __future__ import annotations

from dataclasses import dataclass

from disttrain_trainer.data.corpora.corpus import ShardFile
from disttrain_trainer.data.corpora.files import NumberFiles
from disttrain_trainer.data.corpora.manifest import CorpusError


@dataclass(frozen=True)
class Span:
    """Tokens start .. stop - 1 of a shard."""

    shard: ShardFile
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many."""
        return self.stop - self.start


def split(shards: tuple[ShardFile, ...], fraction: float, files: NumberFiles) -> tuple[list[Span], list[Span]]:
    """Return what is trained on and what is held out: of each shard the end, about `fraction` of it."""
    cuts = [(shard, _cut(shard, fraction, files)) for shard in shards]
    training = [Span(shard, 0, cut) for shard, cut in cuts if cut > 0]
    return training, [Span(shard, cut, shard.tokens) for shard, cut in cuts if cut < shard.tokens]


def documents_in(shard: ShardFile, start: int, stop: int, files: NumberFiles) -> list[int]:
    """Return the first tokens, in order, of the documents that begin in start .. stop - 1, where start is above 0.
    Raises CorpusError."""
    found: list[int] = []
    for document in range(_document_before(shard, start, files) + 1, shard.documents.count):
        first, before = shard.documents.start(document, files), found[-1] if found else start
        if first >= stop:
            break
        if first < before:
            raise CorpusError(
                f"{shard.path}: document {document} begins at token {first}, expected {before} or above; the offsets "
                "are damaged"
            )
        found.append(first)
    return found


def _cut(shard: ShardFile, fraction: float, files: NumberFiles) -> int:
    """Return the first token that is held out: a document's first, unless that would double or halve the part."""
    wanted = int(shard.tokens * fraction)
    if wanted == 0:
        return shard.tokens
    place = shard.tokens - wanted
    before = _document_before(shard, place, files)
    for candidate in (shard.documents.start(document, files) for document in (before + 1, before)):
        if candidate > 0 and wanted / 2 <= shard.tokens - candidate <= wanted * 2:
            return candidate
    return place


def _document_before(shard: ShardFile, place: int, files: NumberFiles) -> int:
    """Return the last document that begins before `place`; a few reads, however many documents there are."""
    low, high = 0, shard.documents.count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if shard.documents.start(middle, files) < place else (low, middle)
    return low
