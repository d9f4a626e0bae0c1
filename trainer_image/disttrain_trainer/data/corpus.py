"""Tokenised corpora as sequences that predict their next token, packed across documents."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from disttrain_api.corpus import INDEXED_SUFFIXES, CorpusConfig, MixedCorpus
from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.data.corpora.corpus import Corpus, open_corpus
from disttrain_trainer.data.corpora.files import NumberFiles
from disttrain_trainer.data.corpora.manifest import CorpusError
from disttrain_trainer.data.corpora.megatron import open_indexed
from disttrain_trainer.data.corpora.mixture import Mixture, shares
from disttrain_trainer.data.corpora.spans import split
from disttrain_trainer.data.corpora.stream import TokenStream
from disttrain_trainer.data.packed import Packed, pack
from disttrain_trainer.data.remote_corpora import open_remote, open_remote_indexed
from disttrain_trainer.data.rows import predicting_the_next
from disttrain_trainer.protocols import MapDataset
from disttrain_trainer.runtime.errors import DataNotFound, InvalidConfiguration
from disttrain_trainer.runtime.object_path import ObjectPath, location

_MAX_NAME = 40
Sample = tuple[Tensor, Tensor] | Packed


class TokenSequences(Dataset[Sample]):
    """Sample i: tokens i T .. i T + T - 1 as input, the same shifted by one as target; both [T], int64."""

    def __init__(self, tokens: TokenStream, length: int, documents: bool = False) -> None:
        """documents: whether samples are Packed."""
        self.tokens = tokens
        self.length = length
        self.documents = documents

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> Sample:
        """Raises DataNotFound for a file that is damaged or gone."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Sample]:
        """Return these samples, read together. Raises as for one."""
        starts = [index * self.length for index in indices]
        # Not _corpus_errors, which for one sample takes a tenth of the time.
        try:
            windows = self.tokens.rows(starts, self.length + 1)
            if not self.documents:
                return predicting_the_next(windows)
            documents = (self.tokens.documents(start, self.length + 1) for start in starts)
            return [pack(*one) for one in zip(torch.from_numpy(windows.astype(np.int64)), documents, strict=True)]
        except CorpusError as error:
            raise _not_found(error) from error


class MixedSequences(Dataset[Sample]):
    """Samples of several corpora; sample i is that which the mixture says."""

    def __init__(self, parts: Sequence[TokenSequences], mixture: Mixture) -> None:
        self.parts, self.mixture = list(parts), mixture

    def __len__(self) -> int:
        return len(self.mixture)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Sample]:
        """Return these samples, those of a corpus read together."""
        places = [self.mixture.locate(index) for index in indices]
        found: list[Sample | None] = [None] * len(places)
        for part in {part for part, _ in places}:
            at = [place for place, (own, _) in enumerate(places) if own == part]
            samples = self.parts[part].__getitems__([places[place][1] for place in at])
            if len(at) == len(places):
                return samples
            for place, sample in zip(at, samples, strict=True):
                found[place] = sample
        return [sample for sample in found if sample is not None]


def load(config: CorpusConfig) -> Datasets:
    """Training and held-out sequences. Raises DataNotFound naming the file."""
    entries = config.mixture or [MixedCorpus(path=config.path or "")]
    files = NumberFiles()
    with _corpus_errors():
        corpora = [_open(location(entry.path), config, files) for entry in entries]
        _require_one_tokenizer(corpora)
        parts = [_sequences(corpus, config, files) for corpus in corpora]
    training, held_out = [part for part, _ in parts], [part for _, part in parts if len(part)]
    fingerprint, *former = _fingerprints(corpora, entries, config)
    return Datasets(
        training[0] if config.mixture is None else _mixed(training, entries, config.temperature or 1.0),
        _joined(held_out),
        max(corpus.vocabulary for corpus in corpora),
        fingerprint,
        former_fingerprints=former,
        settings={"heldOutFraction": config.held_out_fraction, "sequenceLength": config.sequence_length},
        packed=config.document_mask,
        parts=list(zip(_names(entries), map(len, held_out), strict=True)) if len(held_out) > 1 else (),
    )


def _open(place: Path | ObjectPath, config: CorpusConfig, files: NumberFiles) -> Corpus:
    vocabulary = config.vocabulary_size if place.suffix in INDEXED_SUFFIXES else None
    if isinstance(place, Path):
        return open_corpus(place) if vocabulary is None else open_indexed(place, vocabulary)
    cache = Path(config.cache_folder) if config.cache_folder is not None else None
    if vocabulary is None:
        return open_remote(place, cache, files.attach)
    return open_remote_indexed(place, cache, vocabulary, files.attach)


def _require_one_tokenizer(corpora: Sequence[Corpus]) -> None:
    """Raises CorpusError: a number would be one word here and another one there."""
    known = [corpus for corpus in corpora if corpus.tokenizer is not None]
    for corpus in known:
        if corpus.tokenizer != known[0].tokenizer:
            raise CorpusError(f"{corpus.path} was prepared with another tokenizer than {known[0].path}")


def _sequences(corpus: Corpus, config: CorpusConfig, files: NumberFiles) -> tuple[TokenSequences, TokenSequences]:
    """Return what is trained on and what is held out. Raises CorpusError where there is too little."""
    spans = split(corpus.shards, config.held_out_fraction, files)
    found = [
        TokenSequences(TokenStream(one, corpus.vocabulary, files), config.sequence_length, config.document_mask)
        for one in spans
    ]
    wanted = {"training": found[0]} | ({"held-out": found[1]} if config.held_out_fraction > 0 else {})
    for name, samples in wanted.items():
        if len(samples) == 0:
            raise CorpusError(
                f"{corpus.path} has {len(samples.tokens)} {name} tokens, expected more than sequenceLength, which is "
                f"{config.sequence_length}"
            )
    return found[0], found[1]


def _mixed(parts: Sequence[TokenSequences], entries: Sequence[MixedCorpus], temperature: float) -> MixedSequences:
    weights = [entry.weight or float(len(part.tokens)) for entry, part in zip(entries, parts, strict=True)]
    try:
        return MixedSequences(parts, Mixture([len(part) for part in parts], shares(weights, temperature)))
    except (ValueError, ZeroDivisionError) as error:
        raise InvalidConfiguration(
            f"`training.data.config.mixture`: {error}; give weights that differ less, or a higher `temperature`"
        ) from error


def _joined(parts: Sequence[TokenSequences]) -> MapDataset | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return ConcatDataset(parts)


def _names(entries: Sequence[MixedCorpus]) -> list[str]:
    """Return a name of each corpus for its figures: the last one of its path, numbered where there are several."""
    found: list[str] = []
    for entry in entries:
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", Path(entry.path).name)[:_MAX_NAME].lstrip(".-") or "corpus"
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        found.append(next(one for one in names if one not in found))
    return found


def _fingerprints(corpora: Sequence[Corpus], entries: Sequence[MixedCorpus], config: CorpusConfig) -> list[str]:
    """Return what tells this data from other, the corpus's own, of a mixture also its weights; then what earlier
    releases took for it."""
    if config.mixture is None:
        return [corpora[0].fingerprint]
    parts = [f"{corpus.fingerprint} {entry.weight}" for corpus, entry in zip(corpora, entries, strict=True)]
    # An absent temperature is 1. It has been written as None; a given one was written as it is, also where it was 1.
    written = [None, 1.0] if config.temperature in (None, 1.0) else [config.temperature]
    return [hashlib.sha256("\n".join([*parts, str(one)]).encode()).hexdigest() for one in written]


@contextmanager
def _corpus_errors() -> Iterator[None]:
    """Turn errors of a corpus into errors that end the rank."""
    try:
        yield
    except CorpusError as error:
        raise _not_found(error) from error


def _not_found(error: CorpusError) -> DataNotFound:
    return DataNotFound(f"`training.data.config`: {error}")
