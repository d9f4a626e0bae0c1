"""Collective operations, and what crosses each link for them."""

from enum import StrEnum


class Operation(StrEnum):
    """MPI's collectives, and a ring in which each rank sends to the next one."""

    BROADCAST = "broadcast"
    SCATTER = "scatter"
    GATHER = "gather"
    ALL_GATHER = "all-gather"
    REDUCE = "reduce"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    SEND_RECV = "send-recv"


_WHOLE = (Operation.BROADCAST, Operation.REDUCE, Operation.SEND_RECV)


def bus_factor(operation: Operation, ranks: int) -> float:
    """Return what each of `ranks` links must carry at least, per byte of the buffer."""
    if operation in _WHOLE:
        return 1.0
    once = (ranks - 1) / ranks
    return 2 * once if operation is Operation.ALL_REDUCE else once
