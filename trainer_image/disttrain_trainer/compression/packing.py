"""Several tensors as one row of bytes, so that they travel in one message and are counted exactly."""

from collections.abc import Sequence

import torch
from torch import Tensor

Shapes = Sequence[tuple[int, torch.dtype]]


def pack(parts: Sequence[Tensor]) -> Tensor:
    """1-D tensors of any format -> uint8 [sum of their bytes]."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def shapes_of(parts: Sequence[Tensor]) -> Shapes:
    """Sizes and formats, by which another rank unpacks."""
    return [(part.numel(), part.dtype) for part in parts]


def unpack(packed: Tensor, shapes: Shapes) -> list[Tensor]:
    """The opposite of `pack`. Raises RuntimeError where the bytes are not as many as `shapes` say."""
    pieces = packed.split([size * dtype.itemsize for size, dtype in shapes])
    # Copied, since numbers of eight bytes must begin at a multiple of eight.
    return [piece.clone().view(dtype) for piece, (_, dtype) in zip(pieces, shapes, strict=True)]
