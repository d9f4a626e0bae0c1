"""All-reduce by messages from rank to rank alone, as a schedule plans it."""

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_trainer.collectives.schedules import Schedule, Transfer
from disttrain_trainer.runtime.device import channel_of


def all_reduce(values: Tensor, schedule: Schedule, group: dist.ProcessGroup) -> int:
    """Replace `values` (contiguous, any shape) by its sum over the ranks of `group`, the same bits on every rank.

    Returns the bytes that this rank has sent. Waits for its peers. Raises the backend's RuntimeError where one is gone.
    """
    rank = dist.get_rank(group)
    sent = values.to(channel_of(values.device, dist.get_backend_config(group)))
    chunks = sent.view(-1).tensor_split(schedule.chunks)
    total = sum(_run_round(transfers, chunks, rank, group) for transfers in schedule.rounds)
    if sent is not values:
        values.copy_(sent)
    return total


def _run_round(transfers: tuple[Transfer, ...], chunks: tuple[Tensor, ...], rank: int, group: dist.ProcessGroup) -> int:
    """Send and receive what concerns this rank; the bytes sent. Empty chunks do not travel."""
    own = [transfer for transfer in transfers if chunks[transfer.chunk].numel()]
    outgoing = [transfer for transfer in own if transfer.source == rank]
    # What comes is taken after what goes has gone: a round may send and receive the same chunk.
    incoming = [(transfer, torch.empty_like(chunks[transfer.chunk])) for transfer in own if transfer.target == rank]
    operations = [
        *(dist.P2POp(dist.isend, chunks[one.chunk], group=group, group_peer=one.target) for one in outgoing),
        *(dist.P2POp(dist.irecv, values, group=group, group_peer=one.source) for one, values in incoming),
    ]
    # One batch, without which NCCL waits for ever where two ranks send to each other.
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for transfer, values in incoming:
        chunk = chunks[transfer.chunk]
        if transfer.adds:
            chunk.add_(values)
        else:
            chunk.copy_(values)
    return sum(chunks[one.chunk].nbytes for one in outgoing)
