"""Attention of parts of sequences whose keys and values travel around the ranks (Ring Attention, Liu et al. 2023).

Sequences are cut into 2 c pieces, and rank i has two of them, i and 2 c - 1 - i: one near the head and one near the
tail, so that causal attention is as much work on every rank (zig-zag; another such order is that of Striped
Attention, Brandon et al. 2023). In c steps each rank sees the keys and values of all others, which come from the rank
before it and go on to the one behind it while they are computed with. In step s it has those of rank i - s:

- s = 0: its own, causal;
- s <= i, those of an earlier rank: all its queries see the piece near the head, and none that near the tail;
- s > i, those of a later rank: its queries near the tail see both pieces, and those near the head none.

Results of the steps are merged by the logarithms of their sums of exponentials. Backward, keys and values make the same
way; behind them travel their gradients, which every rank adds to, and which are complete when they arrive at home.
Shapes: B batch, T tokens of a part, c ranks of a group, H heads, D' width of a head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_trainer.parallel.context.attention_blocks import Block, kernel_for, wide_format
from disttrain_trainer.parallel.context.part import METHOD, Context
from disttrain_trainer.runtime.errors import InvalidConfiguration

# Of messages of two kinds between the same two ranks, each is received as what it is.
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
        piece, half = torch.arange(tokens // 2, device=device), tokens // 2
        return torch.cat([piece + number * half for number in (self.index, 2 * self.degree - 1 - self.index)])

    def causal_attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, scale: float | None = None
    ) -> Tensor:
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
        found: Tensor = _RingAttention.apply(query, key, value, self, scale)
        return found

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        raise InvalidConfiguration(
            f"{METHOD} Ring computes causal attention to all tokens before, and a layer of the model computes another "
            "one (a window, or a kernel of its own): use Ulysses"
        )

    def seen(self, step: int, tokens: int) -> "_Seen":
        """Return what is computed in a step with parts of so many tokens."""
        half = tokens // 2
        if step == 0:
            return _Seen(slice(None), slice(None), causal=True)
        earlier = step <= self.index
        return _Seen(slice(None), slice(half)) if earlier else _Seen(slice(half, None), slice(None))

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


class _Seen(NamedTuple):
    """Which of a rank's queries look at which of the keys that are there."""

    queries: slice
    keys: slice
    causal: bool = False


class _RingAttention(torch.autograd.Function):
    """Queries, keys and values of this rank's tokens -> their attention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, scale: float) -> Tensor:
        kernel, wide, groups = kernel_for(query), wide_format(query.dtype), query.shape[1] // key.shape[1]
        query, own = query.contiguous(), torch.stack([key, value])
        out = torch.zeros_like(query, dtype=wide)
        lse = torch.full_like(query[..., 0], -torch.inf, dtype=wide)
        visiting = own
        kept: tuple[Tensor, ...] = ()
        for step in range(ring.degree):
            arrived = ring.pass_on(visiting, _KEYS) if step + 1 < ring.degree else None
            seen = ring.seen(step, query.shape[2])
            rows = seen.queries
            with torch.autocast(query.device.type, enabled=False):
                keys, values = _of_every_query(visiting[:, :, :, seen.keys], groups)
                block = kernel.forward(query[:, :, rows], keys, values, scale, seen.causal)
            before, kept = lse[:, :, rows], kept or block.kept
            total = torch.logaddexp(before, block.lse)
            out[:, :, rows] *= (before - total).exp().unsqueeze(-1)
            out[:, :, rows] += (block.lse - total).exp().unsqueeze(-1) * block.out
            lse[:, :, rows] = total
            if arrived is not None:
                visiting = arrived()
        found = out.to(query.dtype)
        ctx.save_for_backward(query, own, found, lse, *kept)
        ctx.ring, ctx.scale, ctx.groups = ring, scale, groups
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, own, out, lse, *kept = ctx.saved_tensors
        ring, kernel, wide = ctx.ring, kernel_for(query), wide_format(query.dtype)
        of_queries, of_visiting = torch.zeros_like(query, dtype=wide), torch.zeros_like(own, dtype=wide)
        visiting, homewards = own, None
        for step in range(ring.degree):
            arrived = ring.pass_on(visiting, _KEYS) if step + 1 < ring.degree else None
            seen = ring.seen(step, query.shape[2])
            rows, columns = seen.queries, seen.keys
            keys, values = _of_every_query(visiting[:, :, :, columns], ctx.groups)
            whole = Block(out[:, :, rows].contiguous(), lse[:, :, rows].contiguous(), tuple(kept))
            found = kernel.backward(
                gradient[:, :, rows].contiguous(), query[:, :, rows].contiguous(), keys, values, whole, ctx.scale,
                seen.causal,
            )  # fmt: skip
            of_queries[:, :, rows] += found[0]
            if homewards is not None:
                of_visiting = homewards()
            of_visiting[:, :, :, columns] += torch.stack([_of_every_key(one.to(wide), ctx.groups) for one in found[1:]])
            # Also after the last step: it was computed with the next rank's own keys.
            homewards = ring.pass_on(of_visiting, _GRADIENTS)
            if arrived is not None:
                visiting = arrived()
        assert homewards is not None
        of_keys, of_values = homewards().to(own.dtype)
        return of_queries.to(query.dtype), of_keys, of_values, None, None


def _of_every_query(keys: Tensor, groups: int) -> Tensor:
    """[2, B, H / groups, K, D'] -> [2, B, H, K, D']: heads that several queries look at, once for each."""
    return keys.repeat_interleave(groups, 2) if groups > 1 else keys.contiguous()


def _of_every_key(gradients: Tensor, groups: int) -> Tensor:
    """[B, H, K, D'] -> [B, H / groups, K, D']: the sum of what they get from each."""
    return gradients.unflatten(1, (-1, groups)).sum(2) if groups > 1 else gradients
