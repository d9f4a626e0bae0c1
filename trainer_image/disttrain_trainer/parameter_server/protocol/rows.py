"""The gradient of a table (the weight of a sparse embedding): that of the few rows which a batch has touched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The gradient of some rows; that of the others is zero. Sums and products look as those of tensors."""

    places: Tensor
    """[n] int64, each once."""
    values: Tensor
    """[n, width]."""

    def __mul__(self, factor: float) -> Rows:
        return Rows(self.places, self.values * factor)

    def add_(self, other: Rows) -> Rows:
        """The sum. Not in place, for there may be more rows in it."""
        return merged(torch.cat([self.places, other.places]), torch.cat([self.values, other.values]))


def merged(places: Tensor, values: Tensor) -> Rows:
    """Rows [n] and their gradients [n, width], of which those of the same row are summed up."""
    once, which = places.unique(return_inverse=True)
    return Rows(once, values.new_zeros(len(once), values.shape[1]).index_add_(0, which, values))
