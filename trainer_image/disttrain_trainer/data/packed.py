"""Samples of several documents in a row, which attention keeps apart."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from disttrain_trainer.losses import IGNORED


class Packed(NamedTuple):
    """A sample, or a batch of them."""

    inputs: Tensor
    """[T] or [B, T], int64."""
    targets: Tensor
    """The same size: the token after each, IGNORED behind the last one of a document."""
    starts: Tensor
    """The same size, but for parts of sequences whole: where in the sample the document of each token begins."""


def pack(window: Tensor, documents: Sequence[int]) -> Packed:
    """Return the sample of T + 1 tokens. documents: which of them are the first of one, in order."""
    length, first = len(window) - 1, torch.tensor(documents, dtype=torch.int64)
    targets = window[1:].clone()
    # A target that begins a document cannot be predicted: nothing of the document was seen.
    targets[first[first > 0] - 1] = IGNORED
    starts = torch.zeros(length, dtype=torch.int64)
    inside = first[first < length]
    starts[inside] = inside
    return Packed(window[:-1], targets, starts.cummax(0).values)


def join(samples: Sequence[tuple[Tensor, Tensor]], length: int) -> Packed:
    """Return the sample of `length` tokens that has these inputs [t] and targets [t] in a row, each as a document.
    What is left behind them is filled up with one that predicts nothing."""
    left = torch.zeros(length - sum(len(inputs) for inputs, _ in samples), dtype=torch.int64)
    documents = [*samples, (left, torch.full_like(left, IGNORED))]
    lengths = torch.tensor([len(inputs) for inputs, _ in documents])
    inputs, targets = (torch.cat(parts) for parts in zip(*documents, strict=True))
    return Packed(inputs, targets, (lengths.cumsum(0) - lengths).repeat_interleave(lengths))
