"""Samples that were read together, as the rows of one batch."""

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Sample = tuple[Tensor, Tensor]


class Predicting(NamedTuple):
    """A batch of sequences [B, T], int64, of which every target counts: none is IGNORED."""

    inputs: Tensor
    targets: Tensor


class Rows(Sequence[Sample]):
    """Sequences [T] and their targets [T] that are a batch already: nobody has to take it apart and put it together."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        """inputs, targets: [B, T]; every target counts."""
        self.batch = Predicting(inputs, targets)

    def __len__(self) -> int:
        # Not len(), which torch answers in Python.
        return self.batch[0].shape[0]

    def cut(self, sizes: list[int]) -> list["Rows"]:
        """Return the samples in parts of so many, which share their memory."""
        return list(map(Rows, self.batch.inputs.split(sizes), self.batch.targets.split(sizes)))

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> "Rows": ...

    def __getitem__(self, index: int | slice) -> "Sample | Rows":
        inputs, targets = self.batch.inputs[index], self.batch.targets[index]
        return Rows(inputs, targets) if isinstance(index, slice) else (inputs, targets)


def predicting_the_next(windows: NDArray[np.integer]) -> Rows:
    """Return the samples of windows [B, T + 1] of tokens, each of which predicts the one after it."""
    # Each is cast by itself: to cast once and copy twice takes twice as long.
    inputs, targets = (torch.from_numpy(part.astype(np.int64)) for part in (windows[:, :-1], windows[:, 1:]))
    return Rows(inputs, targets)
