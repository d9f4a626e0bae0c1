"""Input of each rank to a collective, and its expected output. Pure; ranks are relative to the group.

Every element depends on its rank and its index, so that a rank, a block or an element in the wrong place is seen.
Values are whole numbers below PRIME: their sums over up to 16,000 ranks are exact in FP32.
"""

import torch
from torch import Tensor

from disttrain_api.collectives import Operation
from disttrain_trainer.checks.collectives.plan import ROOT

PRIME = 1021
_PER_RANK = 101
_PER_INDEX = 7


def source(rank: int, numbers: int, number_format: torch.dtype) -> Tensor:
    """[numbers]: what `rank` gives; also the begin of what it gives to a larger buffer."""
    return ((torch.arange(numbers) * _PER_INDEX + rank * _PER_RANK) % PRIME).to(number_format)


def given(operation: Operation, rank: int, ranks: int, numbers: int, number_format: torch.dtype) -> Tensor | None:
    """Return the input of `rank` of `ranks`; None if it has none. `numbers`: of the larger buffer."""
    if operation in (Operation.BROADCAST, Operation.SCATTER) and rank != ROOT:
        return None
    small = operation in (Operation.GATHER, Operation.ALL_GATHER)
    return source(rank, numbers // ranks if small else numbers, number_format)


def expected(operation: Operation, rank: int, ranks: int, numbers: int, number_format: torch.dtype) -> Tensor | None:
    """Return the expected output of `rank` of `ranks`; None if it has none."""
    block = numbers // ranks
    own = slice(rank * block, (rank + 1) * block)

    def of(other: int, length: int = numbers) -> Tensor:
        return source(other, length, number_format)

    if operation is Operation.BROADCAST:
        return of(ROOT)
    if operation is Operation.SCATTER:
        return of(ROOT)[own]
    if operation is Operation.SEND_RECV:
        return of((rank - 1) % ranks)
    if operation is Operation.ALL_TO_ALL:
        return torch.cat([of(other)[own] for other in range(ranks)])
    if operation in (Operation.GATHER, Operation.REDUCE) and rank != ROOT:
        return None
    if operation in (Operation.GATHER, Operation.ALL_GATHER):
        return torch.cat([of(other, block) for other in range(ranks)])
    total = torch.zeros(numbers, dtype=number_format)
    for other in range(ranks):
        total += of(other)
    return total[own] if operation is Operation.REDUCE_SCATTER else total
