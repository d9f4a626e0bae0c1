"""Averages over replicas, in few large all-reduces."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_trainer.collectives.schedules import ring_bytes

# About as many as DDP takes.
_BUCKET_BYTES = 25 * 2**20


def average(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> int:
    """Replace each tensor by its mean over `group`, the same bits on every rank. A collective call.

    Returns the bytes that this rank sends for it if the backend's all-reduce is a ring.
    """
    ranks = group.size()
    size = 0
    for bucket in buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        size += flat.nbytes
        dist.all_reduce(flat, group=group)
        flat.div_(ranks)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))
    return ring_bytes(ranks, size)


def buckets(tensors: Iterable[Tensor], size_bytes: int = _BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Tensors of one number format and device at a time, in order; a bucket that holds `size_bytes` is full."""
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        first = bucket[0] if bucket else tensor
        if held >= size_bytes or (first.dtype, first.device) != (tensor.dtype, tensor.device):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
    if bucket:
        yield bucket
