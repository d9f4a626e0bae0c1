"""Samples of several corpora in given shares: a pure function of the sample's number.

Numbers 0 .. size - 1 are cut into a range for each corpus, as long as its share. The data's order permutes them all
(data/sampler.py), so each batch draws from the corpora in their shares, whatever the number of ranks, and nothing has
to be remembered but the position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

MAX_SIZE = 2**53
"""Samples of an epoch. Shares are doubles, which count so far."""


def shares(weights: Sequence[float], temperature: float) -> list[float]:
    """Return each corpus's part of the samples: weights to the power of 1 / temperature, which add up to 1.

    A temperature above 1 evens out, as for languages of unlike sizes (Xue and others, "mT5", 2021, section 3.2, with
    alpha = 1 / temperature).
    """
    largest = max(weights)
    powers = [(weight / largest) ** (1 / temperature) for weight in weights]
    return [power / sum(powers) for power in powers]


class Mixture:
    """An epoch in which each corpus has its share and is read once at least; small ones come several times."""

    def __init__(self, sizes: Sequence[int], parts: Sequence[float]) -> None:
        """sizes: samples of each corpus; parts: its share. Raises ValueError for an epoch that is too long."""
        # The corpus that needs most samples of the mixture until it has been read.
        longest = max(size / part for size, part in zip(sizes, parts, strict=True))
        if longest > MAX_SIZE:
            raise ValueError(f"an epoch has {longest:.3g} samples, expected at most {MAX_SIZE}")
        counts = [max(size, round(part * longest)) for size, part in zip(sizes, parts, strict=True)]
        self._sizes = list(sizes)
        self._starts = [0, *accumulate(counts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def locate(self, number: int) -> tuple[int, int]:
        """Return the corpus of a sample, and its number there."""
        at = bisect_right(self._starts, number) - 1
        return at, (number - self._starts[at]) % self._sizes[at]
