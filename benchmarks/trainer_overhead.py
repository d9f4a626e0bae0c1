"""What the trainer's loop costs beside a bare PyTorch loop: tokens per second of both, in turn, two ranks on gloo.

Same model, data, optimizer and torch calls (benchmarks/bare_loop.py). Goal: at least 0.97 of the bare loop's.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "trainer_image")]

from benchmarks import harness, ranks

RANKS, WARM, TOKENS = 2, 10, 128
STRATEGIES = {
    "DDP": {},
    "FSDP2": {"dataParallelShardDegree": RANKS},
    "tensor parallel": {"tensorParallelDegree": RANKS},
    "pipeline, 1F1B": {"pipelineParallelDegree": RANKS, "pipeline": {"microbatches": 2 * RANKS}},
}


def job(parallelism: dict[str, Any], steps: int) -> dict[str, Any]:
    """job.json of a GPT that computes for some tens of milliseconds per step."""
    training = {
        "model": {"name": "gpt", "config": {"layers": 4, "heads": 4, "width": 128, "tieWeights": False}},
        "data": {
            "name": "synthetic",
            "config": {"kind": "Tokens", "sequenceLength": TOKENS, "size": 4096, "heldOutFraction": 0.01},
        },
        "optimizer": {"name": "AdamW", "learningRate": 0.001},
        "steps": steps,
        "microBatchSize": 8,
        "logging": {"interval": WARM},
    }
    return ranks.job(training, parallelism)


def ours(steps: int, parallelism: dict[str, Any]) -> float:
    """Median seconds per step of the trainer, of those after the warm-up."""
    # One checkpoint, after the last step and outside of what is measured.
    described = job(parallelism, WARM + steps)
    described["training"]["checkpoint"] = {"interval": WARM + steps}
    return statistics.median(line["time_metrics/end_to_end(s)"] for line in ranks.train(described, RANKS)[1:])


def bare(steps: int, parallelism: dict[str, Any]) -> float:
    """Mean of each ten steps of the bare loop, as the trainer reports them; the median of those."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job(parallelism, WARM + steps)))
        printed = ranks.run(folder, "benchmarks.bare_loop", RANKS, str(folder / "job.json"), str(WARM), str(steps))
        seconds = [float(line) for line in printed.split()]
        return statistics.median(statistics.mean(seconds[at : at + WARM]) for at in range(0, steps, WARM))


def measure(quick: bool) -> Iterator[harness.Row]:
    steps, repeats = (30, 1) if quick else (100, 5)
    for name, parallelism in STRATEGIES.items():
        # Microbatches of 8 sequences: one for each replica, or as many as flow through the pipeline.
        cut = "tensorParallelDegree" in parallelism
        tokens = 8 * TOKENS * (1 if cut else parallelism.get("pipeline", {}).get("microbatches", RANKS))
        values, references = [], []
        for _ in range(repeats):
            references.append(tokens / bare(steps, parallelism))
            values.append(tokens / ours(steps, parallelism))
        yield harness.row(f"{name}: throughput", "tokens/s", values, references)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch",))
