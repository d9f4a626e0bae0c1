"""Random tokens in memory, as a data set of a user: what is measured with it has no part in making them."""

import torch
from torch import Tensor

Samples = list[tuple[Tensor, Tensor]]


def tokens(samples: int, length: int, vocabulary: int) -> tuple[Samples, None]:
    """`samples` pairs of tokens [length] below `vocabulary` and each one's successor [length], int64; none held out."""
    drawn = torch.randint(vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(0))
    return [(sequence[:-1], sequence[1:]) for sequence in drawn], None
