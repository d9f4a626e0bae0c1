"""What the trainer's loop costs beside a bare PyTorch loop: tokens per second of both, in turn, two ranks on gloo.

Same model, data, optimizer and torch calls (benchmarks/bare_loop.py). Goal: at least 0.97 of the bare loop's.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "trainer_image")]

from benchmarks import harness
from tests.cluster.ports import free_port
from tests.cluster.processes import dying_with_parent

RANKS, WARM, TOKENS = 2, 10, 128
STRATEGIES = {
    "DDP": {},
    "FSDP2": {"dataParallelShardDegree": RANKS},
    "tensor parallel": {"tensorParallelDegree": RANKS},
}
LIMIT_SECONDS = 600


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
    return {
        "name": "overhead",
        "namespace": "default",
        "uid": "1",
        "parallelism": parallelism,
        "training": training,
        "checkpointFolder": "overhead",
    }


def run(folder: Path, module: str, *arguments: str) -> str:
    """What rank 0 prints."""
    port = str(free_port())
    paths = os.pathsep.join(str(REPOSITORY / part) for part in (".", "api", "trainer_image"))
    ranks = []
    for rank in range(RANKS):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": paths,
            "DISTTRAIN_CONFIG": str(folder / "job.json"),
            "DISTTRAIN_STORAGE": str(folder),
        }
        command = dying_with_parent([sys.executable, "-m", module, *arguments])
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=LIMIT_SECONDS)[0] for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    if any(codes):
        raise SystemExit(f"{module} ended with {codes}")
    return outputs[0]


def ours(steps: int, parallelism: dict[str, Any]) -> float:
    """Median seconds per step of the trainer, of those after the warm-up."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # One checkpoint, after the last step and outside of what is measured.
        described = job(parallelism, WARM + steps)
        described["training"]["checkpoint"] = {"interval": WARM + steps}
        (folder / "job.json").write_text(json.dumps(described))
        run(folder, "disttrain_trainer.train")
        lines = [json.loads(line) for line in (folder / "overhead" / "metrics.jsonl").read_text().splitlines()]
        seconds = [line["time_metrics/end_to_end(s)"] for line in lines if "lr" in line]
        return statistics.median(seconds[1:])


def bare(steps: int, parallelism: dict[str, Any]) -> float:
    """Mean of each ten steps of the bare loop, as the trainer reports them; the median of those."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job(parallelism, WARM + steps)))
        printed = run(folder, "benchmarks.bare_loop", str(folder / "job.json"), str(WARM), str(steps))
        seconds = [float(line) for line in printed.split()]
        return statistics.median(statistics.mean(seconds[at : at + WARM]) for at in range(0, steps, WARM))


def measure(quick: bool) -> Iterator[harness.Row]:
    steps, repeats = (30, 1) if quick else (100, 5)
    for name, parallelism in STRATEGIES.items():
        tokens = 8 * TOKENS * (1 if "tensorParallelDegree" in parallelism else RANKS)
        values, references = [], []
        for _ in range(repeats):
            references.append(tokens / bare(steps, parallelism))
            values.append(tokens / ours(steps, parallelism))
        yield harness.row(f"{name}: throughput", "tokens/s", values, references)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch",))
