"""How long training stands still for a save in the background, beside one that it waits for; two ranks on gloo.

A GPT of 26 million parameters with AdamW: 310 MB. Goal: at most 0.10 of the waiting save's.
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
from benchmarks.trainer_overhead import RANKS, job

STRATEGIES = {"DDP": {}, "FSDP2": {"dataParallelShardDegree": RANKS}}
STEPS_BETWEEN = 3


def large_job(parallelism: dict[str, Any]) -> dict[str, Any]:
    """A job of a model whose checkpoint is large, with steps that are short."""
    described = job(parallelism, 1000)
    training = described["training"]
    training["model"]["config"] |= {"layers": 8, "heads": 8, "width": 512}
    training["data"]["config"]["sequenceLength"] = 16
    training["microBatchSize"] = 1
    return described


def measure(quick: bool) -> Iterator[harness.Row]:
    repeats = 2 if quick else 10
    for name, parallelism in STRATEGIES.items():
        described = large_job(parallelism)
        described["training"]["checkpoint"] = {"keepLatest": 1}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "job.json").write_text(json.dumps(described))
            printed = ranks.run(Path(folder), "benchmarks.saving_rank", RANKS, str(repeats), str(STEPS_BETWEEN))
        pairs = [tuple(map(float, line.split())) for line in printed.splitlines()]
        yield harness.row(f"{name}: stall", "s", [stall for stall, _ in pairs], [waited for _, waited in pairs])


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch",))
