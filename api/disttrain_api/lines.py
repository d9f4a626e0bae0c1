"""`training.data.config` of texts that are tokenised while they are read."""

from typing import Annotated

from pydantic import Field

from disttrain_api.base import ApiModel
from disttrain_api.corpus import Path

MAX_REPLICAS = 960
"""Texts are dealt out to so many readers: the number of replicas must divide it."""


class LinesConfig(ApiModel):
    """Texts of JSON Lines, tokenised while they are read, in a row, cut into sequences, each predicting its next token:
    for what cannot be prepared as a corpus."""

    path: Path
    """A file of JSON Lines, or a folder with some (*.jsonl, *.ndjson); the same in every pod. s3://bucket/folder is one
    in an object store, of which all that lies directly in it is read."""
    field: Annotated[str, Field(min_length=1, max_length=253)] = "text"
    """Field of each line with its text."""
    tokenizer: Path | None = None
    """A folder with `tokenizer.json` and `tokenizer_config.json`, as a model's is; needs the extra `hf`. Absent: each
    byte is a token."""
    end_of_document: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """A token of the tokenizer that follows each text. Absent: none."""
    begin_of_document: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """A token of the tokenizer that precedes each text. Absent: none."""
    sequence_length: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Tokens per sample. Samples go on across the end of a text."""
    order_seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the order in which pieces of the files are read, another one in each pass."""
    held_out_samples: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """So many are kept for evaluation, from the end of the files, and read when a rank begins. 0: none."""
