"""Pairing of ranks, and the verdict on nodes from the results. Pure; every rank computes the same verdict."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high

SLOW_FACTOR = 3.0
"""A node is slow where the median of the others is more than this many times as fast."""
MOST_ROUNDS = 15


@dataclass(frozen=True)
class Transfer:
    """A transfer from `sender` to `receiver`."""

    sender: int
    receiver: int
    wrong: int
    """Elements that were not those that were sent."""
    bandwidth: float | None = None
    """Bytes per second, where it was timed."""


@dataclass(frozen=True)
class SlowNode:
    """A node that all others would wait for."""

    name: str
    bandwidth: float
    """Bytes per second, its own."""
    others: float
    """Bytes per second, median of the other nodes."""


def rounds(ranks: int, most: int = MOST_ROUNDS) -> list[list[int | None]]:
    """The partner of each rank in each round; None for one that rests. No two meet twice.

    A tournament's circle method, in which everybody meets everybody in `ranks` - 1 rounds (`ranks` if odd); `most` of
    them, evenly spread, where that is less.
    """
    even = ranks + ranks % 2
    count = even - 1
    chosen = range(count) if count <= most else [index * count // most for index in range(most)]
    return [[_partner(rank, number, even, ranks) for rank in range(ranks)] for number in chosen]


def _partner(rank: int, number: int, even: int, ranks: int) -> int | None:
    circle = even - 1
    if rank == circle:
        # 2 x partner = number (mod circle), which is odd: (circle + 1) / 2 is the inverse of 2.
        return number * (even // 2) % circle
    partner = (number - rank) % circle
    if partner != rank:
        return partner
    return circle if circle < ranks else None


def faulty_nodes(wrong: Iterable[Transfer], nodes: Sequence[str]) -> list[str]:
    """The fewest nodes that explain the wrong transfers, in order of name; `nodes`: of each rank.

    Greedy: the node with most of what is not explained yet is taken; with a tie all of them, for between two nodes
    alone nothing says whose fault it is.
    """
    left = Counter(frozenset((nodes[one.sender], nodes[one.receiver])) for one in wrong if one.wrong)
    found: set[str] = set()
    while left:
        counts: Counter[str] = Counter()
        for link, count in left.items():
            counts.update(dict.fromkeys(link, count))
        largest = max(counts.values())
        found |= {node for node, count in counts.items() if count == largest}
        left = Counter({link: count for link, count in left.items() if not link & found})
    return sorted(found)


def slow_nodes(transfers: Iterable[Transfer], nodes: Sequence[str]) -> list[SlowNode]:
    """The nodes whose transfers with other nodes are far slower than those of the others, in order of name.

    A node's figure is the (higher) median of its transfers with other nodes, so that one slow link blames neither end.
    Two nodes share all their links: nothing can be said of them.
    """
    speeds: dict[str, list[float]] = {}
    for one in transfers:
        ends = {nodes[one.sender], nodes[one.receiver]}
        if one.bandwidth is not None and len(ends) == 2:
            for node in ends:
                speeds.setdefault(node, []).append(one.bandwidth)
    own = {node: median_high(found) for node, found in speeds.items()}
    return [slow for node in sorted(own) if (slow := _slow(node, own)) is not None]


def _slow(node: str, own: Mapping[str, float]) -> SlowNode | None:
    rest = [speed for other, speed in own.items() if other != node]
    others = median(rest)
    return SlowNode(node, own[node], others) if own[node] * SLOW_FACTOR < others else None
