"""Samples per second of pipelines without flush beside 1F1B's, which empties the pipeline in every step.

Layers wait instead of computing (benchmarks/padded_model.py), so that a few cores can stand for four devices.
Reference: 1F1B with p = 4 stages and m = 4 microbatches in the same run. Without its bubble it would be
(m + p - 1) / m = 1.75 times as fast. Goal: at least 1.5 times.
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

STAGES, MICROBATCHES, MICRO = 4, 4, 2
FORWARD_SECONDS, BACKWARD_SECONDS = 0.01, 0.02
LAYERS = 2 * STAGES
WARM = 5
VARIANTS = {
    "PipeDream": {"schedule": "PipeDream"},
    "PipeDream, vertical sync": {"schedule": "PipeDream", "verticalSync": True},
    "PipeDream2BW": {"schedule": "PipeDream2BW", "microbatches": MICROBATCHES},
}
REFERENCE = {"schedule": "1F1B", "microbatches": MICROBATCHES}


def samples_per_second(pipeline: dict[str, Any], batches: int) -> float:
    """Between the first line of the log and the last one, over `batches` batches of MICROBATCHES microbatches each."""
    # An update of PipeDream is one microbatch.
    updates = 1 if "microbatches" in pipeline else MICROBATCHES
    warm, steps = WARM * updates, (WARM + batches) * updates
    config = {"layers": LAYERS, "forward_seconds": FORWARD_SECONDS, "backward_seconds": BACKWARD_SECONDS}
    training = {
        "model": {"entrypoint": "benchmarks.padded_model:padded", "config": config},
        "data": {"entrypoint": "benchmarks.padded_model:numbers"},
        "optimizer": {"name": "SGD", "learningRate": 0.001},
        "steps": steps,
        "microBatchSize": MICRO,
        "logging": {"interval": warm},
        "checkpoint": {"interval": steps},
    }
    lines = ranks.train(ranks.job(training, {"pipelineParallelDegree": STAGES, "pipeline": pipeline}), STAGES)[1:]
    # Each line is about the same number of steps.
    seconds = sum(line["time_metrics/end_to_end(s)"] for line in lines) / len(lines)
    return MICRO * MICROBATCHES / updates / seconds


def measure(quick: bool) -> Iterator[harness.Row]:
    batches, repeats = (4 * WARM, 1) if quick else (8 * WARM, 3)
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    references: list[float] = []
    for _ in range(repeats):
        references.append(samples_per_second(REFERENCE, batches))
        for name in ["PipeDream", "PipeDream2BW"] if quick else VARIANTS:
            found[name].append(samples_per_second(VARIANTS[name], batches))
    ideal = (MICROBATCHES + STAGES - 1) / MICROBATCHES
    for name, values in found.items():
        if values:
            yield harness.row(name, "samples/s", values, references)
    yield harness.row("without the bubble of 1F1B", "samples/s", [ideal * statistics.median(references)], references)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch",))
