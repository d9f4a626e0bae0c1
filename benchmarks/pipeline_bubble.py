"""The bubble of each schedule: measured in the trainer beside what the schedule's own table of actions gives for the
forward and backward times that were measured.

Layers wait instead of computing (benchmarks/padded_model.py), so that a few cores can stand for four devices. Both
numbers are the part of a step, in percent, in which ranks have nothing to do; goal: within 10 points of each other.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "trainer_image")]

from benchmarks import harness, ranks

WARM = 5
FORWARD_SECONDS, BACKWARD_SECONDS = 0.01, 0.02
SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


def job(schedule: str, degree: int, microbatches: int, steps: int) -> dict[str, Any]:
    """Eight layers for two ranks, sixteen for four."""
    config = {
        "layers": 4 * degree,
        "forward_seconds": FORWARD_SECONDS / SCHEDULES[schedule],
        "backward_seconds": BACKWARD_SECONDS / SCHEDULES[schedule],
    }
    training = {
        "model": {"entrypoint": "benchmarks.padded_model:padded", "config": config},
        "data": {"entrypoint": "benchmarks.padded_model:numbers"},
        "steps": WARM + steps,
        "microBatchSize": 2,
        "logging": {"interval": WARM},
        "checkpoint": {"interval": WARM + steps},
    }
    pipeline = {"schedule": schedule, "microbatches": microbatches}
    return ranks.job(training, {"pipelineParallelDegree": degree, "pipeline": pipeline})


def measure(quick: bool) -> Iterator[harness.Row]:
    steps, repeats = (WARM, 1) if quick else (4 * WARM, 1)
    for degree, microbatches in [(2, 4), (4, 8)]:
        for schedule in ["1F1B", "ZBVZeroBubble"] if quick else SCHEDULES:
            lines = [
                line
                for _ in range(repeats)
                for line in ranks.train(job(schedule, degree, microbatches, steps), degree)[1:]
            ]
            measured = [line["pipeline/bubble(%)"] for line in lines]
            expected = [line["pipeline/bubble_of_schedule(%)"] for line in lines]
            name = f"p = {degree}, m = {microbatches}, {schedule}: bubble"
            yield harness.row(name, "% of a step", measured, expected)
            difference = statistics.median(found - wanted for found, wanted in zip(measured, expected, strict=True))
            yield harness.row("  difference", "points", [difference])


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch",))
