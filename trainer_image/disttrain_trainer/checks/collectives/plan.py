"""The checks to do: operations, sizes and groups, from a command line. Imports no torch."""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from disttrain_api.collectives import Operation

T = TypeVar("T")

WORLD = "world"
ROOT = 0
"""Relative rank that sends or receives where one rank does."""

_UNITS = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_SIZE = re.compile(r"(\d+)(k|M|G|Ki|Mi|Gi)?")
_SLICE = re.compile(r"(\d*):(\d*)(?::([1-9]\d*)?)?")


class NumberFormat(StrEnum):
    """Names of torch's number formats in which sums of the check are exact."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    INT32 = "int32"
    INT64 = "int64"

    @property
    def bytes(self) -> int:
        """Size of a number."""
        return 4 if self in (NumberFormat.FLOAT32, NumberFormat.INT32) else 8


@dataclass(frozen=True)
class Plan:
    """The checks to do."""

    operations: tuple[Operation, ...] = tuple(Operation)
    sizes: tuple[int, ...] = (2**10, 2**20)
    """Bytes; of the larger of a rank's two buffers, as nccl-tests count."""
    groups: tuple[str, ...] = (WORLD,)
    number_format: NumberFormat = NumberFormat.FLOAT32
    iterations: int = 20
    warmup: int = 5

    def numbers(self, size: int, ranks: int) -> int:
        """Numbers in the larger buffer: those that `size` bytes hold, a multiple of the ranks, at least one each."""
        return max(size // self.number_format.bytes // ranks, 1) * ranks


def parse_size(text: str) -> int:
    """ "64Ki" -> 65536; units as in Kubernetes. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"'{text}' is not a size: expected bytes such as 512, 64Ki, 1Mi or 2G")
    return int(match[1]) * _UNITS[match[2] or ""]


def group_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Global ranks of a group, ascending: `world`, a slice (`::2`: even ranks, `4:8`), or a list (`0+2+5`).

    Raises ValueError where a rank is not in the world, or fewer than two are left.
    """
    slice_ = _SLICE.fullmatch(text)
    if text == WORLD:
        ranks = list(range(world_size))
    elif slice_ is not None:
        start, stop, step = (int(part) if part else None for part in slice_.groups())
        ranks = list(range(world_size))[start:stop:step]
    elif re.fullmatch(r"\d+(\+\d+)*", text):
        ranks = [int(part) for part in text.split("+")]
    else:
        raise ValueError(f"'{text}' is not a group: expected {WORLD}, a slice of ranks such as ::2 or 4:8, or 0+2+5")
    if len(set(ranks)) != len(ranks) or any(rank >= world_size for rank in ranks) or len(ranks) < 2:
        found = "+".join(map(str, ranks)) or "no rank"
        raise ValueError(f"group '{text}' has {found}: expected two or more different ranks of 0 to {world_size - 1}")
    # As torch numbers them within the group, in whatever order they are named.
    return tuple(sorted(ranks))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that the module and `disttrain collectives` share."""
    default = Plan()
    parser.add_argument(
        "--sizes",
        type=_list_of(parse_size),
        default=default.sizes,
        metavar="SIZE,…",
        help="bytes of each rank's larger buffer (default: 1Ki,1Mi)",
    )
    parser.add_argument(
        "--operations",
        type=_list_of(Operation),
        default=default.operations,
        metavar="NAME,…",
        help="all-reduce, send-recv, … (default: all nine)",
    )
    parser.add_argument(
        "--groups",
        type=_list_of(str),
        default=default.groups,
        metavar="RANKS,…",
        help="world, a slice (::2, 4:8) or ranks (0+2+5) (default: world)",
    )
    parser.add_argument(
        "--type",
        type=NumberFormat,
        choices=list(NumberFormat),
        default=default.number_format,
        metavar="NAME",
        help="float32, float64, int32 or int64 (default: float32)",
    )
    parser.add_argument("--iterations", type=_count, default=default.iterations, metavar="N", help="(default: 20)")
    parser.add_argument("--warmup", type=_count, default=default.warmup, metavar="N", help="not timed (default: 5)")


def plan_of(given: argparse.Namespace) -> Plan:
    """The Plan that `add_arguments` parsed."""
    return Plan(given.operations, given.sizes, given.groups, given.type, given.iterations, given.warmup)


def arguments_of(plan: Plan) -> list[str]:
    """The words that `add_arguments` parses to this Plan."""
    return [
        f"--sizes={','.join(map(str, plan.sizes))}",
        f"--operations={','.join(plan.operations)}",
        f"--groups={','.join(plan.groups)}",
        f"--type={plan.number_format}",
        f"--iterations={plan.iterations}",
        f"--warmup={plan.warmup}",
    ]


def _list_of(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def parsed(text: str) -> tuple[T, ...]:
        try:
            return tuple(parse(part) for part in text.split(","))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {number}")
    return number


def parse(words: Sequence[str] | None = None) -> tuple[Plan, str | None]:
    """The module's command line as a Plan and where JSON is wanted; where it is wrong, the process ends with usage."""
    parser = argparse.ArgumentParser(
        prog="python -m disttrain_trainer.checks.collectives",
        description="Check and time collectives. Started once per rank, as torchrun does (RANK, WORLD_SIZE, …).",
    )
    add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="rank 0 also writes the results there; -: instead of tables")
    given = parser.parse_args(words)
    return plan_of(given), given.json
