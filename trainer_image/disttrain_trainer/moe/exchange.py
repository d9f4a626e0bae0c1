"""Sending assignments to the ranks that hold their experts, and the results back.

Shapes: E experts of all ranks, R ranks of an expert group, n assignments of this rank, D width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Group = dist.ProcessGroup


@dataclass(frozen=True)
class Exchange:
    """Placement of the experts of a layer: rank i of `experts` holds E / R of them, from i E / R on."""

    experts: Group
    tensor: Group | None = None
    """The ranks that have the same tokens as this one; each then sends its part of them."""

    def compute(self, experts: nn.Module, tokens: Tensor, counts: Tensor) -> Tensor:
        """[n, D] -> [n, D], as `experts(tokens, counts)` where they are all here. counts: [E]."""
        ranks = dist.get_world_size(self.experts)
        leaving = counts.view(ranks, -1)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=self.experts)
        sent, received = self.rows(leaving, len(tokens)), self.rows(arriving, len(tokens))
        arrived = _AllToAll.apply(tokens, sent, received, self.experts)
        # They come by rank and then by expert; the experts want them by expert.
        expert = torch.arange(leaving.shape[1], device=tokens.device).repeat(ranks)
        order = expert.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)
        results = experts(arrived.index_select(0, order), arriving.sum(0))
        back = results.index_select(0, order.argsort())
        return _AllToAll.apply(back, received, sent, self.experts)

    def rows(self, counts: Tensor, own: int) -> list[int]:
        """[R, E / R] -> how many rows go to each rank, or come from it. own: rows of this rank."""
        found: list[int] = counts.sum(1).tolist()
        return found

    def share(self, tokens: int, device: torch.device) -> Tensor:
        """[N] of bool: the tokens that this rank sends; those of a tensor group share them."""
        if self.tensor is None:
            return torch.ones(tokens, dtype=torch.bool, device=device)
        ranks = dist.get_world_size(self.tensor)
        return torch.arange(tokens, device=device) * ranks // max(tokens, 1) == dist.get_rank(self.tensor)

    def enter(self, tensor: Tensor) -> Tensor:
        """Unchanged; its gradient, of which each rank of the tensor group has a part, is summed."""
        return tensor if self.tensor is None else _Enter.apply(tensor, self.tensor)

    def leave(self, tensor: Tensor) -> Tensor:
        """Summed over the tensor group, of which each rank has a part; its gradient is alike on all of them."""
        return tensor if self.tensor is None else _Leave.apply(tensor, self.tensor)


class _AllToAll(torch.autograd.Function):
    """[sum(sent), D] -> [sum(received), D]: `sent[i]` rows go to rank i, `received[i]` come from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.back = (received, sent, group)
        return _send(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _send(gradient, *ctx.back), None, None, None


def _send(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group)
    return arrived


class _Enter(torch.autograd.Function):
    """Megatron-LM's f (Shoeybi et al. 2019, section 3): identity, and an all-reduce in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    """Megatron-LM's g: an all-reduce, and identity in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _summed(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
