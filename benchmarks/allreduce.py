"""What an all-reduce costs over 2 to 6 ranks: bytes on the hottest link, and time on this machine (gloo, loopback).

Beside the algorithms of the trainer, parameter servers: as many as ranks, each a process of its own.

Reference of the bytes: those that are summed. Reference of the time: the backend's own all-reduce in the same world.
A machine's loopback is no network: it has no link that Central could wait for, and the ranks share its cores. The bytes
are what a network would see. `allreduce_figure.py` draws both from the JSON.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "trainer_image")]

from benchmarks import harness, ranks

MOST_RANKS = 6


def run(megabytes: float, repeats: int) -> list[dict[str, Any]]:
    """What rank 0 of a world of MOST_RANKS tells, a result for each group and algorithm."""
    with tempfile.TemporaryDirectory() as folder:
        printed = ranks.run(Path(folder), "benchmarks.allreduce_rank", MOST_RANKS, str(megabytes), str(repeats))
    return [json.loads(line) for line in printed.splitlines()]


def measure(quick: bool) -> Iterator[harness.Row]:
    megabytes, repeats = (1, 5) if quick else (16, 15)
    results = run(megabytes, repeats)
    backend = {result["ranks"]: result["seconds"] for result in results if result["algorithm"] == "Backend"}
    for result in results:
        name = f"{result['algorithm']} of {result['ranks']} ranks"
        yield harness.Row(f"{name}: hottest link", result["hottest"] / 2**20, "MiB", float(megabytes))
        times, references = (
            [1000 * one for one in seconds] for seconds in (result["seconds"], backend[result["ranks"]])
        )
        yield harness.row(f"{name}: time", "ms", times, references)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch",))
