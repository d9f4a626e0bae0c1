"""All-reduce as a plan: which rank sends which part of the numbers to which rank, round by round. Pure arithmetic.

What is planned here is what is sent (exchange.py), so that costs can be read off the plan.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from disttrain_api.parallelism import AllReduce


@dataclass(frozen=True)
class Transfer:
    """One message from rank to rank of a group."""

    source: int
    target: int
    chunk: int
    adds: bool
    """Whether the target adds it to what it has; else it takes it instead."""


@dataclass(frozen=True)
class Schedule:
    """An all-reduce of `ranks`: transfers of one round go at the same time, and each round waits for the last one."""

    ranks: int
    chunks: int
    """Parts that the numbers are cut into, as equal as can be."""
    rounds: tuple[tuple[Transfer, ...], ...]

    def sent(self, rank: int, size: int, item_bytes: int) -> int:
        """Bytes that `rank` sends for `size` numbers of `item_bytes` each."""
        return self._bytes(size, item_bytes, lambda transfer: transfer.source == rank)

    def received(self, rank: int, size: int, item_bytes: int) -> int:
        """Bytes that come to `rank`."""
        return self._bytes(size, item_bytes, lambda transfer: transfer.target == rank)

    def hottest_link(self, size: int, item_bytes: int) -> int:
        """Bytes over the busiest connection of a rank with the network, in its busier direction."""
        directions = (self.sent, self.received)
        return max(count(rank, size, item_bytes) for rank in range(self.ranks) for count in directions)

    def contributions(self) -> list[list[list[frozenset[int]]]]:
        """After each round, of each rank, of each chunk: the ranks whose numbers are summed in what it holds."""
        held = [[frozenset({rank})] * self.chunks for rank in range(self.ranks)]
        history = []
        for transfers in self.rounds:
            before, held = held, [list(chunks) for chunks in held]
            for transfer in transfers:
                own = held[transfer.target][transfer.chunk] if transfer.adds else frozenset()
                held[transfer.target][transfer.chunk] = own | before[transfer.source][transfer.chunk]
            history.append(held)
        return history

    def _bytes(self, size: int, item_bytes: int, counts: Callable[[Transfer], bool]) -> int:
        sizes = chunk_sizes(size, self.chunks)
        return item_bytes * sum(
            sizes[transfer.chunk] for transfers in self.rounds for transfer in transfers if counts(transfer)
        )


def chunk_sizes(size: int, chunks: int) -> list[int]:
    """Sizes of the parts of `size` numbers, the larger ones first (as torch.tensor_split cuts)."""
    least, more = divmod(size, chunks)
    return [least + (chunk < more) for chunk in range(chunks)]


@lru_cache
def ring(ranks: int) -> Schedule:
    """2(N - 1) rounds over N chunks: no rank sends more than 2(N - 1)/N of the numbers (Patarasuk and Yuan 2009).

    Scatter-reduce: each rank passes a growing sum on to its right; after N - 1 rounds rank r owns chunk r + 1 (mod N),
    summed. All-gather: the N - 1 other chunks come round in the same way.
    """

    def step(first_chunk: int, adds: bool) -> tuple[Transfer, ...]:
        return tuple(Transfer(rank, (rank + 1) % ranks, (rank + first_chunk) % ranks, adds) for rank in range(ranks))

    steps = range(ranks - 1)
    scatter_reduce = tuple(step(-number, adds=True) for number in steps)
    all_gather = tuple(step(1 - number, adds=False) for number in steps)
    return Schedule(ranks, ranks, scatter_reduce + all_gather)


@lru_cache
def tree(ranks: int) -> Schedule:
    """2 log2 N rounds: sums go up a binomial tree to rank 0 and come down again (Thakur et al. 2005, section 3)."""
    distances = [1 << bit for bit in range((ranks - 1).bit_length())]
    up = tuple(
        tuple(Transfer(rank, rank - distance, 0, adds=True) for rank in range(distance, ranks, 2 * distance))
        for distance in distances
    )
    down = tuple(
        tuple(Transfer(transfer.target, transfer.source, 0, adds=False) for transfer in transfers)
        for transfers in reversed(up)
    )
    return Schedule(ranks, 1, up + down)


@lru_cache
def central(ranks: int) -> Schedule:
    """2 rounds: rank 0 receives the numbers of all, and sends the sum to each. Its cost grows with N."""
    others = range(1, ranks)
    collect = tuple(Transfer(rank, 0, 0, adds=True) for rank in others)
    spread = tuple(Transfer(0, rank, 0, adds=False) for rank in others)
    return Schedule(ranks, 1, (collect, spread) if ranks > 1 else ())


SCHEDULES: Mapping[AllReduce, Callable[[int], Schedule]] = {
    AllReduce.RING: ring,
    AllReduce.TREE: tree,
    AllReduce.CENTRAL: central,
}


def ring_bytes(ranks: int, size_bytes: int) -> int:
    """Return the bytes that a rank sends in a ring all-reduce of `size_bytes`, rounded up. Used for the backend's own
    all-reduce, whose messages cannot be counted.
    """
    return -(-2 * (ranks - 1) * size_bytes // ranks)
