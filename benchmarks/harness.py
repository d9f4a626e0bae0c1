"""What every benchmark shares: its flags, the machine's description, the table and the JSON.

    python benchmarks/NAME.py [--quick] [--json FILE]

A row holds the value and, beside it, the reference measured in the same run: the floor or a peer. Both are medians of
`repeats` runs; `ratio` = value / reference.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    reference: float | None = None
    repeats: int = 1

    @property
    def ratio(self) -> float | None:
        return self.value / self.reference if self.reference else None


def row(name: str, unit: str, values: Sequence[float], references: Sequence[float] = ()) -> Row:
    """The medians of both."""
    reference = statistics.median(references) if references else None
    return Row(name, statistics.median(values), unit, reference, len(values))


def machine(packages: Iterable[str] = ()) -> dict[str, Any]:
    """The machine, and the versions of what was measured."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "packages": versions,
    }


def main(
    description: str | None,
    measure: Callable[..., Iterable[Row]],
    packages: Iterable[str] = (),
    numbers: Mapping[str, str] = MappingProxyType({}),
    parts: Iterable[str] = (),
) -> None:
    """Console script of a benchmark. `measure(quick)` yields its rows; each is printed as soon as it is there.

    `numbers`: further flags, each with its help; `measure` gets them by name where they are given. `parts`:
    what `--only` may name; `measure` gets it as `only` where it is given.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs, within a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parts = tuple(parts)
    if parts:
        parser.add_argument("--only", choices=parts, help="measure this part alone")
    for name, says in numbers.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=says)
    arguments = parser.parse_args()
    given: dict[str, Any] = {name: number for name in numbers if (number := getattr(arguments, name)) is not None}
    if parts and arguments.only is not None:
        given["only"] = arguments.only
    # What the benchmark started is then stopped in order; a SIGKILL is left to the kernel (tools/cluster/processes.py).
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    described = machine(packages)
    print(", ".join(f"{key} {value}" for key, value in described.items() if key != "packages"))
    print(", ".join(f"{key} {value}" for key, value in described["packages"].items()))
    print(f"{'':44} {'value':>10} {'reference':>10} {'ratio':>6}  unit ({'repeats'})")
    rows = []
    for line in measure(arguments.quick, **given):
        print(_printed(line), flush=True)
        rows.append(asdict(line) | {"ratio": line.ratio})
        # As they come: a run that is cut off leaves what it had.
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"machine": described, "rows": rows}, indent=1) + "\n")


def _printed(line: Row) -> str:
    reference = "" if line.reference is None else f"{line.reference:.4g}"
    ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
    return f"{line.name:44} {line.value:10.4g} {reference:>10} {ratio:>6}  {line.unit} ({line.repeats})"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
