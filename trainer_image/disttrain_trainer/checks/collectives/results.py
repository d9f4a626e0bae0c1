"""Measurements, and their output in nccl-tests' columns. Imports no torch.

algbw is bytes / time. busbw multiplies it by what crosses each link per byte, so that it can be held against the
hardware whatever the operation and the number of ranks (NVIDIA nccl-tests, doc/PERFORMANCE.md).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from disttrain_api.collectives import Operation, bus_factor

_GB = 1e9


@dataclass(frozen=True)
class Row:
    """One operation of one size in one group."""

    group: str
    """As it was asked for."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    operation: Operation
    bytes: int
    """Size of the larger of a rank's two buffers."""
    seconds: float
    """How long one call takes, mean over the ranks."""
    wrong: int
    """Elements that were not what they had to be, on all ranks."""
    wrong_ranks: tuple[int, ...]
    """Global ranks that hold them."""

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second and link."""
        return self.algorithm_bandwidth * bus_factor(self.operation, len(self.ranks))


def tables(rows: Iterable[Row]) -> str:
    """A table for each group and size."""
    return "\n".join(
        _table(name, ranks, size, list(some))
        for (name, ranks, size), some in groupby(rows, key=lambda row: (row.group, row.ranks, row.bytes))
    )


def _table(name: str, ranks: tuple[int, ...], size: int, rows: list[Row]) -> str:
    title = f"# {name}: ranks {ranges(ranks)}, {size} bytes"
    head = f"{'operation':<16}{'time(us)':>12}{'algbw(GB/s)':>13}{'busbw(GB/s)':>13}{'wrong':>8}"
    return "\n".join([title, head, *map(_line, rows), ""])


def _line(row: Row) -> str:
    wrong_ranks = f"  on ranks {ranges(row.wrong_ranks)}" if row.wrong else ""
    return (
        f"{row.operation:<16}{row.seconds * 1e6:>12.1f}{row.algorithm_bandwidth / _GB:>13.3f}"
        f"{row.bus_bandwidth / _GB:>13.3f}{row.wrong:>8}{wrong_ranks}"
    )


def ranges(ranks: Sequence[int]) -> str:
    """ "0-3,6" for (0, 1, 2, 3, 6)."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def verdict(rows: Sequence[Row]) -> str:
    """The last line: whether all was right."""
    wrong = [row for row in rows if row.wrong]
    if not wrong:
        return f"{len(rows)} checks, all right"
    return f"{len(rows)} checks, {len(wrong)} with wrong elements"


def to_json(rows: Iterable[Row]) -> str:
    """A list of objects: the fields of Row, and both bandwidths in bytes per second."""
    return json.dumps(
        [
            asdict(row) | {"algorithm_bandwidth": row.algorithm_bandwidth, "bus_bandwidth": row.bus_bandwidth}
            for row in rows
        ]
    )


def from_json(text: str) -> list[Row]:
    """The opposite of `to_json`."""
    return [
        Row(
            group=one["group"],
            ranks=tuple(one["ranks"]),
            operation=Operation(one["operation"]),
            bytes=one["bytes"],
            seconds=one["seconds"],
            wrong=one["wrong"],
            wrong_ranks=tuple(one["wrong_ranks"]),
        )
        for one in json.loads(text)
    ]
