"""Tokens of many spans as if they were one array."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
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
        types = {span.shard.dtype for span in spans}
        self._dtype = types.pop() if len(types) == 1 else np.dtype(np.int64)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Return tokens start .. start + count - 1. Raises IndexError beyond the end, CorpusError for damage."""
        return self.rows([start], count)[0].astype(np.int64)

    def rows(self, starts: Sequence[int], count: int) -> NDArray[np.integer]:
        """Return `count` tokens from each of these on, [number of starts, count], of the type that they are stored in.
        Raises as `read`."""
        found = np.empty((len(starts), count), self._dtype)
        for row, start in zip(found, starts, strict=True):
            passed = 0
            for span, within, taken in self._places(start, count):
                part = row if taken == count else row[passed : passed + taken]
                shard, place = span.shard, span.start + within
                if shard.dtype == self._dtype:
                    self._files.read_into(part, shard.path, place * self._dtype.itemsize)
                else:
                    part[:] = self._files.read(shard.path, shard.dtype, place, taken)
                passed += taken
        # An embedding on a GPU would end the process without a word.
        if found.size and not (found.max() < self._vocabulary and (self._dtype.kind == "u" or found.min() >= 0)):
            self._raise_for(found, starts)
        return found

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

    def _places(self, start: int, count: int) -> Sequence[tuple[Span, int, int]]:
        """Return where these tokens are: a span, the first one in it, how many. Raises IndexError beyond the end."""
        if not 0 <= start <= start + count <= self._starts[-1]:
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        at = bisect_right(self._starts, start) - 1
        within = start - self._starts[at]
        if start + count <= self._starts[min(at + 1, len(self._spans))]:
            return ((self._spans[at], within, count),) if count else ()
        found = []
        while count > 0:
            taken = min(count, self._spans[at].tokens - within)
            found.append((self._spans[at], within, taken))
            at, within, count = at + 1, 0, count - taken
        return found

    def _raise_for(self, found: NDArray[np.integer], starts: Sequence[int]) -> None:
        """Raise CorpusError with the shard of a token that is none, if there is one."""
        for row, start in zip(found, starts, strict=True):
            passed = 0
            for span, _, taken in self._places(start, len(row)):
                for token in (int(row[passed : passed + taken].max()), int(row[passed : passed + taken].min())):
                    if not 0 <= token < self._vocabulary:
                        path = span.shard.path
                        raise CorpusError(f"{path} holds token {token}, expected tokens below {self._vocabulary}")
                passed += taken
