"""Which server holds which numbers: a pure function of names, sizes and the number of servers.

The keys are the numbers of all trained parameters, flattened and laid one after the other in order of names. They are
cut into contiguous ranges of about equal length, one per server: key ranges as in Li et al., "Scaling Distributed
Machine Learning with the Parameter Server" (OSDI 2014), without the hashing: servers are fixed while an attempt lives.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Segment:
    """Numbers `start` to `stop` - 1 of one flattened parameter."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def place(sizes: Mapping[str, int], servers: int) -> tuple[tuple[Segment, ...], ...]:
    """The segments of each server, in order. `sizes`: numbers of each parameter, by name.

    Every number lies in exactly one segment; the servers' shares differ by at most one number. A server may have
    nothing where there are fewer numbers than servers. Raises ValueError where `servers` is below 1.
    """
    if servers < 1:
        raise ValueError(f"{servers} servers, expected at least 1")
    total = sum(sizes.values())
    bounds = [total * index // servers for index in range(servers + 1)]
    found: list[list[Segment]] = [[] for _ in range(servers)]
    begin, server = 0, 0
    for name in sorted(sizes):
        end = begin + sizes[name]
        at = begin
        while at < end:
            while bounds[server + 1] <= at:
                server += 1
            stop = min(end, bounds[server + 1])
            found[server].append(Segment(name, at - begin, stop - begin))
            at = stop
        begin = end
    return tuple(tuple(segments) for segments in found)
