"""Which queries of a rank look at which of the keys that are there, in each step of a ring.

Sequences are cut into 2 c pieces, and rank i has two of them, i and 2 c - 1 - i: one near the head and one near the
tail, so that causal attention is as much work on every rank (zig-zag; another such order is that of Striped
Attention, Brandon et al. 2023). In step s a rank has the keys of rank i - s:

- s = 0: its own, causal;
- s <= i, those of an earlier rank: all its queries see the piece near the head, and none that near the tail;
- s > i, those of a later rank: its queries near the tail see both pieces, and those near the head none.

A document's tokens lie in a row on each rank that has some, and its queries look only at its keys among these: steps
are cut at the ends of documents, and what no document spans is left out.
B batch, T tokens of a part, c ranks of a group.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Look(NamedTuple):
    """Some queries that all look at the same keys, or with `causal` at as many keys up to their own."""

    rows: slice
    """Rows of the batch."""
    queries: slice
    keys: slice
    causal: bool


Run = tuple[int, int]
"""First token, and the one behind the last, among those of a part."""


def positions(index: int, degree: int, tokens: int, device: torch.device) -> Tensor:
    """Return where in the whole sequences the tokens of rank `index` are: [T]."""
    piece, half = torch.arange(tokens // 2, device=device), tokens // 2
    return torch.cat([piece + number * half for number in (index, 2 * degree - 1 - index)])


def whole_steps(index: int, degree: int, tokens: int) -> list[list[Look]]:
    """Return what rank `index` of `degree` computes in each step, where each sequence is one document."""
    every, found = slice(None), []
    for step in range(degree):
        queries, keys = _looks(step, index, tokens)
        found.append([Look(every, slice(*queries), slice(*keys), step == 0)])
    return found


def steps_of_documents(index: int, starts: Tensor, degree: int) -> list[list[Look]]:
    """Return the same within documents. starts: [B, c T] of whole sequences, where the document of each token
    begins."""
    tokens = starts.shape[1] // degree
    if not starts.any():
        return whole_steps(index, degree, tokens)
    runs = [_runs(starts[:, positions(rank, degree, tokens, starts.device)]) for rank in range(degree)]
    found = []
    for step in range(degree):
        queries, keys = _looks(step, index, tokens)
        visiting = runs[(index - step) % degree]
        looks = (
            (row, _common(own, queries), _common(visiting[row, first], keys))
            for (row, first), own in runs[index].items()
            if (row, first) in visiting
        )
        found.append(
            [
                Look(slice(row, row + 1), slice(*own), slice(*other), step == 0)
                for row, own, other in looks
                if own[0] < own[1] and other[0] < other[1]
            ]
        )
    return found


def _looks(step: int, index: int, tokens: int) -> tuple[Run, Run]:
    """Return the queries and the keys of a step."""
    head, tail, every = (0, tokens // 2), (tokens // 2, tokens), (0, tokens)
    if step == 0:
        return every, every
    return (every, head) if step <= index else (tail, every)


def _runs(starts: Tensor) -> dict[tuple[int, int], Run]:
    """Return the tokens of each document, by its row and its first token. starts: [B, T] of a part."""
    found = {}
    for row, own in enumerate(starts):
        firsts, lengths = own.unique_consecutive(return_counts=True)
        begin = 0
        for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True):
            found[row, first] = begin, begin + length
            begin += length
    return found


def _common(one: Run, other: Run) -> Run:
    return max(one[0], other[0]), min(one[1], other[1])
