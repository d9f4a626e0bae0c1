"""Context parallelism: ranks compute parts of the same sequences (DeepSpeed-Ulysses, Jacobs et al. 2023).

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
from torch import Tensor, nn
from torch.nn import functional

from disttrain_trainer.parallel.expert import expert_layers
from disttrain_trainer.protocols import ContextPart, offered
from disttrain_trainer.runtime.errors import InvalidConfiguration

_SETTING = "`parallelism.contextParallelDegree`"


class Context(ContextPart):
    """See ContextPart. Part i has the tokens from i T / c on."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.index, self.degree = dist.get_rank(group), dist.get_world_size(group)

    def part_of(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens [B, T / c, ...] and their classes [B, T / c]. Raises InvalidConfiguration."""
        if targets.dim() != 2 or targets.is_floating_point() or inputs.shape[:2] != targets.shape:
            raise InvalidConfiguration(
                f"{_SETTING} needs samples of `training.data` with a class for each of T tokens: inputs [T, ...] and "
                f"targets [T] of whole numbers, found {list(inputs.shape[1:])} and {list(targets.shape[1:])} "
                f"({str(targets.dtype).removeprefix('torch.')})"
            )
        length = targets.shape[1]
        if length % self.degree:
            raise InvalidConfiguration(
                f"{_SETTING}: the sequences of `training.data` are {length} long, which must be a multiple of "
                f"{self.degree}"
            )
        own = slice(self.index * length // self.degree, (self.index + 1) * length // self.degree)
        return inputs[:, own].contiguous(), targets[:, own].contiguous()

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        return torch.arange(self.index * tokens, (self.index + 1) * tokens, device=device)

    def causal_attention(self, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
        return self.attend(
            query, key, value, partial(functional.scaled_dot_product_attention, dropout_p=dropout, is_causal=True)
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        heads, of_keys, degree = query.shape[1], key.shape[1], self.degree
        if heads % degree or (of_keys % degree and degree % of_keys):
            raise InvalidConfiguration(
                f"{_SETTING}: {heads} heads of attention must be a multiple of {degree}, and {of_keys} of keys a "
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


def compute_parts(module: nn.Module, group: dist.ProcessGroup) -> Context:
    """Make the model compute this rank's part of every sequence, and return what says which. Raises
    InvalidConfiguration where it cannot."""
    use_context, name = offered(module, "use_context"), type(module).__name__
    if use_context is None:
        raise InvalidConfiguration(
            f"{_SETTING}: the model {name} has no method `use_context`, which makes it compute parts of sequences; add "
            "it, or use `dataParallelShardDegree` instead"
        )
    if expert_layers(module):
        raise InvalidConfiguration(
            f"{_SETTING}: the model {name} has experts, and how busy each is is counted in whole sequences: remove one "
            "of the two"
        )
    context = Context(group)
    use_context(context)
    return context


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
