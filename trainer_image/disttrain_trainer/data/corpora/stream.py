"""Tokens of many spans as if they were one array."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from disttrain_trainer.data.corpora.files import NumberFiles
from disttrain_trainer.data.corpora.manifest import CorpusError
from disttrain_trainer.data.corpora.spans import Span, documents_in


class TokenStream:
    """The tokens of `spans`, one after the other; none is `vocabulary` or more."""

    def __init__(self, spans: Sequence[Span], vocabulary: int, files: NumberFiles) -> None:
        self._spans, self._vocabulary, self._files = list(spans), vocabulary, files
        self._starts = [0, *accumulate(span.tokens for span in spans)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Return tokens start .. start + count - 1. Raises IndexError beyond the end, CorpusError for damage."""
        parts = [self._part(*place) for place in self._places(start, count)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def documents(self, start: int, count: int) -> list[int]:
        """Return which of the tokens start .. start + count - 1 are the first of a document, counted from `start`; what
        lies on both sides of the end of a span are two documents. Raises as `read`."""
        found: list[int] = []
        passed = 0
        for span, within, taken in self._places(start, count):
            if within == 0:
                found.append(passed)
            place = span.start + within
            first = documents_in(span.shard, max(place, span.start + 1), place + taken, self._files)
            found += [passed + one - place for one in first]
            passed += taken
        return found

    def _places(self, start: int, count: int) -> Iterator[tuple[Span, int, int]]:
        """Yield where these tokens are: a span, the first one in it, and how many. Raises IndexError beyond the end."""
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        at = bisect_right(self._starts, start) - 1
        within = start - self._starts[at]
        while count > 0:
            taken = min(count, self._spans[at].tokens - within)
            yield self._spans[at], within, taken
            at, within, count = at + 1, 0, count - taken

    def _part(self, span: Span, within: int, count: int) -> NDArray[np.int64]:
        shard = span.shard
        tokens = self._files.read(shard.path, shard.dtype, span.start + within, count).astype(np.int64)
        # An embedding on a GPU would end the process without a word.
        for found in (int(tokens.max(initial=0)), int(tokens.min(initial=0))):
            if not 0 <= found < self._vocabulary:
                raise CorpusError(f"{shard.path} holds token {found}, expected tokens below {self._vocabulary}")
        return tokens
