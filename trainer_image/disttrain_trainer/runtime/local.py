"""A rank's part of a tensor that is distributed over ranks."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in the same memory; of any other tensor, itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
