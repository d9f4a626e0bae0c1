"""What kopf's watch of the jobs costs beside the operator's own informer: CPU per job and per event, and memory.

Both follow the same collection, played without a network: a list of all jobs, then one event of each. The value is
kopf's, the reference the informer's, each in a process of its own.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

from benchmarks import harness

JOBS, QUICK, REPEATS = 10_000, 1_000, 3
MEASURED = (
    ("CPU per job of a list", "ms"),
    ("CPU per event", "ms"),
    ("memory per job, at most", "KiB"),
)


def follow(by: str, jobs: int) -> list[float]:
    """One life of a follower; a number for each of MEASURED."""
    command = [sys.executable, "-m", "benchmarks.kopf_watch_process", by, str(jobs)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    numbers: list[float] = json.loads(done.stdout)
    return numbers


def measure(quick: bool) -> Iterator[harness.Row]:
    jobs = QUICK if quick else JOBS
    kopf, informer = list[list[float]](), list[list[float]]()
    for _ in range(REPEATS):
        informer.append(follow("informer", jobs))
        kopf.append(follow("kopf", jobs))
    for (name, unit), values, references in zip(
        MEASURED, zip(*kopf, strict=True), zip(*informer, strict=True), strict=True
    ):
        yield harness.row(f"{jobs} jobs: {name}", unit, values, references)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("kopf", "orjson"))
