"""Samples of texts that are few enough to be tokenised before the first step, numbered as those of a corpus.

With fewer blocks than lanes some lanes would begin with the block of others, and batches would hold samples twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from disttrain_trainer.data.sampler import permute
from disttrain_trainer.data.texts.lanes import Tokens, sample_of


class Whole:
    """An iterable data set (protocols.IterableDataset) of (input, target), both [T], int64.

    Each pass is a permutation of all samples. Sample i begins with token i T; the last one goes on with the first
    tokens, so that nothing is left out.
    """

    def __init__(self, tokens: Tokens, length: int, seed: int, part: int = 0, parts: int = 1) -> None:
        """tokens: all texts in a row, at least one token. part: takes every `parts`-th sample, from this one on."""
        self._tokens, self._length, self._seed = tokens, length, seed
        self._part, self._parts = part, parts
        self._read = 0

    def shard(self, index: int, count: int) -> Whole:
        """Return the part of a replica."""
        part, parts = self._part + index * self._parts, self._parts * count
        return Whole(self._tokens, self._length, self._seed, part, parts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = -(-len(self._tokens) // self._length)
        while True:
            once, place = divmod(self._part + self._read * self._parts, size)
            self._read += 1
            begin = int(permute(np.array([place]), size, self._seed, once)[0]) * self._length
            yield sample_of(self._tokens.take(np.arange(begin, begin + self._length + 1), mode="wrap"))

    def state_dict(self) -> dict[str, Any]:
        return {"read": self._read}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.load_state_dicts([state] * self._parts)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go to the position at which `states`, of another number of replicas, have read as many samples together."""
        if "read" not in states[0]:
            raise ValueError(
                "it is a position in the order of an earlier version, which repeated samples of files as small as "
                "these: begin anew with the checkpoint's weights: `training.checkpoint.initialFrom`"
            )
        # All replicas have read as many.
        self._read = states[0]["read"] * len(states) // self._parts
