"""Tensors of one rank for all ranks of a group, whatever their number format and layout.

A backend reads as many numbers as a tensor has from where it begins, which is right of dense ones alone, and knows some
formats only. So bytes are sent, of dense copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disttrain_trainer.parallel.average import buckets
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.local import local_part


@torch.no_grad()
def share(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank of the group the tensors of its first one, in few messages. A collective call."""
    held = [local_part(tensor) for tensor in tensors]
    # Alike formats next to each other fill the messages.
    for bucket in buckets(sorted(held, key=lambda tensor: (str(tensor.device), str(tensor.dtype)))):
        parts = [_bytes_of(tensor) for tensor in bucket]
        flat = torch.cat(parts)
        dist.broadcast(flat, group=group, group_src=0)
        for tensor, part in zip(bucket, flat.split([part.numel() for part in parts]), strict=True):
            # A copy begins where any format may begin.
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def require_elements_apart(module: nn.Module) -> None:
    """Raises InvalidConfiguration naming a parameter or buffer that nothing can be written to."""
    named: Mapping[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in named.items():
        if tensor.layout != torch.strided:
            raise InvalidConfiguration(
                f"the model's `{name}` is a tensor of layout {tensor.layout}, which ranks cannot share and checkpoints "
                "cannot hold: make it dense, or keep it outside of buffers"
            )
        again = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        if again and tensor.numel():
            raise InvalidConfiguration(
                f"elements of the model's `{name}` share memory: its shape is {list(tensor.shape)} and its strides are "
                f"{list(tensor.stride())}, so that nothing can be loaded into it; give it memory of its own: "
                "`tensor.contiguous()`"
            )


def _bytes_of(tensor: Tensor) -> Tensor:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)
