"""Calls of torch.distributed, one for each operation, over buffers that are made once."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_api.collectives import Operation
from disttrain_trainer.checks.collectives.expected import given
from disttrain_trainer.checks.collectives.plan import ROOT
from disttrain_trainer.runtime.device import channel_of

_POISON = -1
"""Fills what is to be received; no rank ever gives it."""


class Call:
    """One operation of this rank in a group; called as often as one likes."""

    def __init__(
        self, operation: Operation, group: dist.ProcessGroup, numbers: int, number_format: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`numbers`: of the larger buffer, a multiple of the group's ranks."""
        self.rank, self.ranks, self._group = dist.get_rank(group), dist.get_world_size(group), group
        own = given(operation, self.rank, self.ranks, numbers, number_format)
        held = numbers // self.ranks if operation in (Operation.SCATTER, Operation.REDUCE_SCATTER) else numbers
        received = torch.full((held,), _POISON, dtype=number_format)
        if operation in (Operation.BROADCAST, Operation.REDUCE, Operation.ALL_REDUCE) and own is not None:
            # In place: what is given is what becomes the result.
            received = own
        self._own = torch.empty(0, dtype=number_format, device=device) if own is None else own.to(device)
        self.received = received.to(device)
        self._perform = _PERFORM[operation]

    def __call__(self) -> None:
        self._perform(self._own, self.received, self._group)

    def clear(self) -> None:
        """Zeros everywhere: what is summed in place again and again must stay finite while it is timed."""
        self._own.zero_()
        self.received.zero_()


def _blocks(buffer: Tensor, group: dist.ProcessGroup) -> list[Tensor] | None:
    ranks = dist.get_world_size(group)
    return list(buffer.chunk(ranks)) if dist.get_rank(group) == ROOT else None


def _ring(own: Tensor, received: Tensor, group: dist.ProcessGroup) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    channel = channel_of(own.device, dist.get_backend_config(group))
    sent, arriving = own.to(channel), received.to(channel)
    transfers = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    if arriving is not received:
        received.copy_(arriving)


# torch 2.13 gave both a new name, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_Perform = Callable[[Tensor, Tensor, dist.ProcessGroup], object]
_PERFORM: dict[Operation, _Perform] = {
    Operation.BROADCAST: lambda _, held, group: dist.broadcast(held, group_src=ROOT, group=group),
    Operation.SCATTER: lambda own, held, group: dist.scatter(held, _blocks(own, group), group_src=ROOT, group=group),
    Operation.GATHER: lambda own, held, group: dist.gather(own, _blocks(held, group), group_dst=ROOT, group=group),
    Operation.ALL_GATHER: lambda own, held, group: _all_gather(held, own, group=group),
    Operation.REDUCE: lambda _, held, group: dist.reduce(held, group_dst=ROOT, group=group),
    Operation.ALL_REDUCE: lambda _, held, group: dist.all_reduce(held, group=group),
    Operation.REDUCE_SCATTER: lambda own, held, group: _reduce_scatter(held, own, group=group),
    Operation.ALL_TO_ALL: lambda own, held, group: dist.all_to_all_single(held, own, group=group),
    Operation.SEND_RECV: _ring,
}
