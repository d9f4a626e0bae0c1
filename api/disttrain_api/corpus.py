"""`training.data.config` of corpora: tokens that lie in folders."""

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from disttrain_api.base import ApiModel

_STORE = re.compile(r"s3://[^/ ]+(/[^/ ]+)*")
INDEXED_SUFFIXES = (".bin", ".idx")
"""Suffixes of the two files of one of Megatron-LM's indexed data sets."""

Path = Annotated[str, Field(min_length=1, max_length=4096)]


class MixedCorpus(ApiModel):
    """One corpus of several."""

    path: Path
    """As `path` of the whole."""
    weight: Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)] | None = None
    """How many of the samples are its, beside the others' weights: of all corpora, or of none. Absent: its number of
    tokens."""


class CorpusConfig(ApiModel):
    """Tokens that `disttrain data prepare` has written, cut into sequences, each predicting its next token."""

    path: Path | None = None
    """The folder, or the .bin or .idx of an indexed data set of Megatron-LM; the same in every pod. s3://bucket/folder
    is one in an object store."""
    cache_folder: Path | None = None
    """With corpora in an object store: where what was read of them is kept, for example on a disk of the node that jobs
    share. Absent: the pod's scratch space."""
    mixture: Annotated[list[MixedCorpus], Field(min_length=1, max_length=100)] | None = None
    """Instead of `path`: corpora of one tokenizer, each of which gives its share of the samples."""
    temperature: Annotated[float, Field(ge=0.1, le=1000, allow_inf_nan=False)] | None = None
    """With `mixture`: weights count to the power of 1 / temperature. Absent: 1."""
    vocabulary_size: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """With indexed data sets, which do not say it: all tokens are below."""
    sequence_length: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Tokens per sample. Samples go on across the end of a document."""
    document_mask: bool = False
    """Whether attention stays within the documents of a sample, in each of which positions begin at 0. The last token
    of a document then predicts nothing."""
    held_out_fraction: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.01
    """Part of the tokens that is kept for evaluation: the end of each shard. 0: none."""

    @property
    def paths(self) -> list[str]:
        """All that are read."""
        return [entry.path for entry in self.mixture or []] + ([] if self.path is None else [self.path])


def corpus_problems(config: CorpusConfig) -> Iterator[tuple[str, str]]:
    """Yield what does not go together: field below `spec`, sentence."""
    place = "training.data.config"
    if (config.path is None) == (config.mixture is None):
        yield place, "exactly one of `path` and `mixture` must be given"
    if config.temperature is not None and config.mixture is None:
        yield f"{place}.temperature", "needs `mixture`: set it, or remove this field"
    unweighted = [entry.path for entry in config.mixture or [] if entry.weight is None]
    if 0 < len(unweighted) < len(config.mixture or []):
        found = f"{unweighted[0]:.200} has none, and its number of tokens would count beside the weights of the others"
        yield f"{place}.mixture", f"must have a `weight` in each entry or in none: {found}"
    stores = [path for path in config.paths if "://" in path]
    if wrong := [path for path in stores if not _STORE.fullmatch(path)]:
        yield f"{place}.path", f"must be a folder or s3://bucket/folder, found {wrong[0]:.200}"
    if config.cache_folder is not None and not stores:
        yield f"{place}.cacheFolder", "needs a corpus in an object store (s3://…): remove this field"
    indexed = [path for path in config.paths if path.endswith(INDEXED_SUFFIXES)]
    if indexed and config.vocabulary_size is None:
        yield f"{place}.vocabularySize", f"must be given: {indexed[0]:.200} does not record how many tokens there are"
    if not indexed and config.vocabulary_size is not None:
        yield f"{place}.vocabularySize", "must be left out: the corpus records how many tokens there are"
