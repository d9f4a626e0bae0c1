"""Attention of some queries to some keys, as a part of that to all keys: with the logarithm of the sum of exponentials.

Scores of queries with keys become weights by a softmax over all keys. For some of the keys these functions return the
attention by itself and the logarithm of the sum of exponentials (LSE) of its scores, which says what it weighs beside
that to other keys. The gradient needs the attention to all keys and its LSE, and none of the other keys.
Shapes: B batch, H heads, Q queries, K keys, D' width of a head: [B, H, Q or K, D'], LSE [B, H, Q].
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from disttrain_trainer.runtime.device import allows_flash_attention, in_host_memory, takes_flash_attention

_ATEN = torch.ops.aten


class Block(NamedTuple):
    """Attention to some keys."""

    out: Tensor
    lse: Tensor
    kept: tuple[Tensor, ...] = ()
    """What the kernel's backward pass wants, alike for all blocks."""


class Kernel(Protocol):
    """Computes blocks. causal: as many queries as keys, each of which looks at the keys up to its own."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Block:
        """Return the attention."""

    @staticmethod
    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Block, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what these keys add to the gradient of the queries, and the gradients of keys and values. gradient:
        of the attention to all keys, which is `whole`."""


def kernel_for(query: Tensor) -> type[Kernel]:
    """Return torch's kernel without score matrices, where it has one for this device and format and may use it."""
    if in_host_memory(query) and allows_flash_attention():
        return OnCpu
    return Flash if takes_flash_attention(query) else Plain


class OnCpu:
    """torch's flash attention on a CPU, which takes all formats."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Block:
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return Block(out, lse)

    @staticmethod
    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Block, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, whole.out, whole.lse, 0.0, causal, scale=scale
        )
        return found


class Flash:
    """torch's flash attention on a GPU: FP16 and BF16."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Block:
        out, lse, _, _, _, _, *random, _ = _ATEN._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )
        return Block(out, lse, tuple(random))

    @staticmethod
    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Block, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = query.shape[2], key.shape[2]
        # Sequences of one length have no sums of lengths.
        found: tuple[Tensor, Tensor, Tensor] = _ATEN._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, whole.out, whole.lse, None, None, *lengths, 0.0, causal, *whole.kept,
            scale=scale,
        )  # fmt: skip
        return found


class Plain:
    """Matrix products, with all scores of a block in memory."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Block:
        scores = _scores(query, key, scale, causal)
        lse = scores.logsumexp(-1)
        return Block(((scores - lse.unsqueeze(-1)).exp() @ value.to(scores.dtype)).to(value.dtype), lse)

    @staticmethod
    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Block, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = (_scores(query, key, scale, causal) - whole.lse.unsqueeze(-1)).exp()
        wide = weights.dtype
        gradient = gradient.to(wide)
        of_weights = gradient @ value.to(wide).transpose(-1, -2)
        # What all weights of a query share, so that these add up to one.
        shared = (gradient * whole.out.to(wide)).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - shared) * scale
        of_queries, of_keys = of_scores @ key.to(wide), of_scores.transpose(-1, -2) @ query.to(wide)
        return of_queries, of_keys, weights.transpose(-1, -2) @ gradient


def wide_format(like: torch.dtype) -> torch.dtype:
    """Return the format in which sums over blocks are kept."""
    return torch.promote_types(like, torch.float32)


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    """[B, H, Q, K]."""
    wide = wide_format(query.dtype)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores
