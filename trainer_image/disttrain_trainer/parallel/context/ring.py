"""Attention of parts of sequences whose keys and values travel around the ranks (Ring Attention, Liu et al. 2023).

In c steps each rank sees the keys and values of all others (ring_steps.py), which come from the rank before it and go
on to the one behind it while they are computed with. Results of the steps are merged by the logarithms of their sums of
exponentials. Backward, keys and values make the same way; behind them travel their gradients, which every rank adds to,
and which are complete when they arrive at home.
Shapes: B batch, T tokens of a part, c ranks of a group, H heads, D' width of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_trainer.parallel.context.attention_blocks import Block, kernel_for, wide_format
from disttrain_trainer.parallel.context.part import METHOD, Context
from disttrain_trainer.parallel.context.ring_steps import Look, positions, steps_of_documents, whole_steps
from disttrain_trainer.runtime.errors import InvalidConfiguration

# Two ranks exchange messages of two kinds, and each is received as what it is.
_KEYS, _GRADIENTS = 0, 1


class Ring(Context):
    """See ContextPart. Part i has the pieces i and 2 c - 1 - i of 2 c."""

    def __init__(self, group: dist.ProcessGroup, channel: torch.device) -> None:
        """channel: device from which tensors are sent."""
        super().__init__(group)
        self._channel = channel

    @property
    def pieces(self) -> int:
        return 2 * self.degree

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        return positions(self.index, self.degree, tokens, device)

    def causal_attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, scale: float | None = None
    ) -> Tensor:
        steps = whole_steps(self.index, self.degree, query.shape[2])
        return self.causal_steps(query, key, value, steps, dropout, scale)

    def steps_of_documents(self, starts: Tensor) -> list[list[Look]]:
        """Return what `causal_steps` computes within documents. starts: [B, T] of whole sequences, where the document
        of each token begins."""
        return steps_of_documents(self.index, starts, self.degree)

    def causal_steps(
        self, query: Tensor, key: Tensor, value: Tensor, steps: list[list[Look]], dropout: float, scale: float | None
    ) -> Tensor:
        """Return `causal_attention` by these steps."""
        if dropout:
            raise InvalidConfiguration(
                f"{METHOD} Ring computes attention without dropout, found {dropout:g}: set it to 0, or use Ulysses"
            )
        kind = query.device.type
        if torch.is_autocast_enabled(kind) and query.dtype is not torch.float64:
            # As torch's own function does.
            query, key, value = (one.to(torch.get_autocast_dtype(kind)) for one in (query, key, value))
        if scale is None:
            scale = query.shape[-1] ** -0.5
        found: Tensor = _RingAttention.apply(query, key, value, self, steps, scale)
        return found

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        raise InvalidConfiguration(
            f"{METHOD} Ring computes causal attention to all tokens before, and a layer of the model computes another "
            "one (a window, or a kernel of its own): use Ulysses"
        )

    def pass_on(self, sent: Tensor, tag: int) -> Callable[[], Tensor]:
        """Send a tensor to the next rank; return a function that waits for the same one of the rank before."""
        leaving = sent.to(self._channel).contiguous()
        arriving = torch.empty_like(leaving)
        following, before = ((self.index + step) % self.degree for step in (1, -1))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, leaving, group=self._group, tag=tag, group_peer=following),
                dist.P2POp(dist.irecv, arriving, group=self._group, tag=tag, group_peer=before),
            ]
        )

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return arriving.to(sent.device)

        return arrived


class _RingAttention(torch.autograd.Function):
    """Queries, keys and values of this rank's tokens -> their attention."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, steps: list[list[Look]], scale: float
    ) -> Tensor:
        kernel, wide, groups = kernel_for(query), wide_format(query.dtype), query.shape[1] // key.shape[1]
        query, own = query.contiguous(), torch.stack([key, value])
        out = torch.zeros_like(query, dtype=wide)
        lse = torch.full_like(query[..., 0], -torch.inf, dtype=wide)
        visiting = own
        kept: tuple[Tensor, ...] = ()
        for step, looks in enumerate(steps):
            arrived = ring.pass_on(visiting, _KEYS) if step + 1 < ring.degree else None
            for rows, queries, columns, causal in looks:
                place = rows, slice(None), queries
                with torch.autocast(query.device.type, enabled=False):
                    keys, values = _of_every_query(visiting[:, rows, :, columns], groups)
                    block = kernel.forward(query[place], keys, values, scale, causal)
                before, kept = lse[place], kept or block.kept
                total = torch.logaddexp(before, block.lse)
                out[place] *= (before - total).exp().unsqueeze(-1)
                out[place] += (block.lse - total).exp().unsqueeze(-1) * block.out
                lse[place] = total
            if arrived is not None:
                visiting = arrived()
        found = out.to(query.dtype)
        ctx.save_for_backward(query, own, found, lse, *kept)
        ctx.ring, ctx.steps, ctx.scale, ctx.groups = ring, steps, scale, groups
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, own, out, lse, *kept = ctx.saved_tensors
        ring, kernel, wide = ctx.ring, kernel_for(query), wide_format(query.dtype)
        of_queries, of_visiting = torch.zeros_like(query, dtype=wide), torch.zeros_like(own, dtype=wide)
        visiting, homewards = own, None
        for step, looks in enumerate(ctx.steps):
            arrived = ring.pass_on(visiting, _KEYS) if step + 1 < ring.degree else None
            found = []
            for rows, queries, columns, causal in looks:
                place = rows, slice(None), queries
                keys, values = _of_every_query(visiting[:, rows, :, columns], ctx.groups)
                whole = Block(out[place].contiguous(), lse[place].contiguous(), tuple(kept))
                of_look = kernel.backward(
                    gradient[place].contiguous(), query[place].contiguous(), keys, values, whole, ctx.scale, causal
                )
                of_queries[place] += of_look[0]
                found.append(torch.stack([_of_every_key(one.to(wide), ctx.groups) for one in of_look[1:]]))
            if homewards is not None:
                of_visiting = homewards()
            for (rows, _, columns, _), of_keys in zip(looks, found, strict=True):
                of_visiting[:, rows, :, columns] += of_keys
            # Also after the last step: it was computed with the next rank's own keys.
            homewards = ring.pass_on(of_visiting, _GRADIENTS)
            if arrived is not None:
                visiting = arrived()
        assert homewards is not None
        of_keys, of_values = homewards().to(own.dtype)
        return of_queries.to(query.dtype), of_keys, of_values, None, None, None


def _of_every_query(keys: Tensor, groups: int) -> Tensor:
    """[2, B, H / groups, K, D'] -> [2, B, H, K, D']: heads that several queries look at, once for each."""
    return keys.repeat_interleave(groups, 2) if groups > 1 else keys.contiguous()


def _of_every_key(gradients: Tensor, groups: int) -> Tensor:
    """[B, H, K, D'] -> [B, H / groups, K, D']: the sum of what they get from each."""
    return gradients.unflatten(1, (-1, groups)).sum(2) if groups > 1 else gradients
