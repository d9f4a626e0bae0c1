"""Attention of parts of sequences that exchanges tokens for heads (DeepSpeed-Ulysses, Jacobs et al. 2023).

A rank has T / c tokens in a row of every sequence. All layers but attention look at one token at a time. Attention
exchanges tokens for heads: by an all-to-all each rank gets whole sequences of H / c heads, computes them as one process
would, and gives the results back by another. Their backward passes are the same two in reverse.
Shapes: B batch, T tokens of a sequence, c ranks of a group, H heads, D' width of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from disttrain_trainer.parallel.context.part import SETTING, Context
from disttrain_trainer.runtime.errors import InvalidConfiguration


class Ulysses(Context):
    """Part i has the tokens from i T / c on."""

    @property
    def pieces(self) -> int:
        return self.degree

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        return torch.arange(self.index * tokens, (self.index + 1) * tokens, device=device)

    def causal_attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, scale: float | None = None
    ) -> Tensor:
        attention = partial(
            functional.scaled_dot_product_attention,
            dropout_p=dropout,
            is_causal=True,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.attend(query, key, value, attention)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        heads, of_keys, degree = query.shape[1], key.shape[1], self.degree
        if heads % degree or (of_keys % degree and degree % of_keys):
            raise InvalidConfiguration(
                f"{SETTING}: {heads} heads of attention must be a multiple of {degree}, and {of_keys} of keys a "
                "multiple of it or a divisor"
            )
        if of_keys % degree:
            # Ranks whose queries look at the same head get it each.
            key, value = (one.repeat_interleave(degree // of_keys, 1) for one in (key, value))
        tokens = (query, key, value)
        # Heads of all three, [B, H / c, T / c, D'] to each rank; from them, in their order, the rest of the sequences.
        packed = torch.cat([one.unflatten(1, (degree, -1)) for one in tokens], 2).movedim(1, 0)
        arrived = _AllToAll.apply(packed, self._group).movedim(0, 2).flatten(2, 3)
        whole = attention(*arrived.split([one.shape[1] // degree for one in tokens], 1))
        # [B, H / c, T, D'] to all ranks by tokens.
        parts = whole.unflatten(2, (degree, -1)).movedim(2, 0)
        back: Tensor = _AllToAll.apply(parts, self._group).movedim(0, 1).flatten(1, 2)
        return back


class _AllToAll(torch.autograd.Function):
    """[c, ...] -> [c, ...]: row i goes to rank i, and what comes from it takes its place."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None


def _exchange(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    arrived = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived, rows.contiguous(), group=group)
    return arrived
