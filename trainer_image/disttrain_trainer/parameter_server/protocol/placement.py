"""Which server holds which numbers: a pure function of names, sizes and the number of servers.

The keys are the numbers of all trained parameters, flattened and laid one after the other in order of names. They are
cut into contiguous ranges of about equal length, one per server: key ranges as in Li et al., "Scaling Distributed
Machine Learning with the Parameter Server" (OSDI 2014), without the hashing: servers are fixed while an attempt lives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType


@dataclass(frozen=True, order=True)
class Segment:
    """Numbers `start` to `stop` - 1 of one flattened parameter."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Placement = Sequence[Sequence[Segment]]
"""The segments of each server, in order."""


def place(
    sizes: Mapping[str, int], servers: int, widths: Mapping[str, int] = MappingProxyType({})
) -> tuple[tuple[Segment, ...], ...]:
    """The segments of each server, in order. `sizes`: numbers of each parameter, by name.

    `widths`: numbers of a row of each parameter whose rows stay whole.

    Every number lies in exactly one segment; the servers' shares differ by at most one number, where rows stay whole by
    less than two of the widest. A server may have nothing where there are fewer numbers than servers. Raises ValueError
    where `servers` is below 1.
    """
    if servers < 1:
        raise ValueError(f"{servers} servers, expected at least 1")
    total = sum(sizes.values())
    bounds = [total * index // servers for index in range(servers + 1)]
    found: list[list[Segment]] = [[] for _ in range(servers)]
    begin = 0
    for name in sorted(sizes):
        size, width = sizes[name], widths.get(name, 1)
        cuts = [min(max(bound - begin, 0), size) // width * width for bound in bounds[1:-1]]
        for server, (start, stop) in enumerate(pairwise([0, *cuts, size])):
            if start < stop:
                found[server].append(Segment(name, start, stop))
        begin += size
    return tuple(tuple(segments) for segments in found)
