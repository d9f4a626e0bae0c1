"""Prompts that a language model continues at evaluations, as tokens, and what it writes as text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from disttrain_api.samples import FIELD, SamplesConfig
from disttrain_trainer.data.tokenizer import Codec, Tokens, load_codec
from disttrain_trainer.runtime.errors import InvalidConfiguration


@dataclass(frozen=True)
class Prompts:
    """The prompts of a job, in the order of the manifest."""

    config: SamplesConfig
    rows: Sequence[Tokens]
    """Tokens of each prompt."""
    codec: Codec

    @property
    def longest(self) -> int:
        """Tokens of the longest input: a prompt with all that is written after it but the last."""
        return max(map(len, self.rows)) + self.config.max_new_tokens - 1

    @property
    def vocabulary(self) -> int:
        """All tokens of the prompts are below."""
        return max(int(row.max()) for row in self.rows) + 1

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that differ where tokens do."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(np.array([len(row), *row], "<i8").tobytes())
        digest.update(str(self.codec.end).encode())
        return digest.hexdigest()

    def text_after(self, number: int, written: Sequence[int]) -> str:
        """Return what the tokens say after this prompt: decoders may write a first token in another way."""
        row = self.rows[number].tolist()
        start, whole = self.codec.decode(row), self.codec.decode([*row, *written])
        return whole[len(start) :] if whole.startswith(start) else self.codec.decode(written)


def load_prompts(config: SamplesConfig, longest: int) -> Prompts:
    """Return the prompts. longest: input that the model takes. Raises DataNotFound or InvalidConfiguration."""
    codec = load_codec(f"{FIELD}.tokenizer", config.tokenizer)
    rows = codec.encode(config.prompts)
    for number, row in enumerate(rows):
        if not len(row):
            raise InvalidConfiguration(
                f"`{FIELD}.prompts[{number}]` has no token: give the model something to continue"
            )
        if len(row) + config.max_new_tokens > longest:
            raise InvalidConfiguration(
                f"`{FIELD}.prompts[{number}]` is {len(row)} tokens, with `maxNewTokens` "
                f"{len(row) + config.max_new_tokens}, of which the model takes {longest}: shorten it, or lower "
                "`maxNewTokens`"
            )
    return Prompts(config, rows, codec)
