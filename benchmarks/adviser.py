"""Six layouts of one model on two ranks: the time of a step measured beside what `disttrain plan` estimates for it.

Network and processor are measured first, as a user would: `disttrain collectives --json`, and a product of matrices
with the threads of a rank. The last rows compare the layout that the estimates choose with the fastest one that was
measured. Goal: at most 1.25 times its time.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / part) for part in (".", "api", "cli", "operator", "trainer_image")]

from benchmarks import harness, ranks
from disttrain.planning.cost import Machine, step_time
from disttrain.planning.layouts import pipeline_ranks
from disttrain.planning.machine import Given, machine_of
from disttrain.planning.memory import rank_memory
from disttrain_api.manifest import of_object
from disttrain_api.names import API_VERSION, KIND
from disttrain_api.spec import DistTrainingJob

WARM, RANKS = 3, 2
SHARD, TENSOR, PIPELINE = "dataParallelShardDegree", "tensorParallelDegree", "pipelineParallelDegree"
RECOMPUTED = {"activationCheckpointing": "Full"}
# parallelism, changes of the training
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2": ({}, {}),
    "dp2, recomputed": ({}, RECOMPUTED),
    "fsdp2": ({SHARD: 2}, {}),
    "tp2": ({TENSOR: 2}, {}),
    "pp2, 1F1B, 2 microbatches": ({PIPELINE: 2, "pipeline": {"microbatches": 2}}, {}),
    "pp2, 1F1B, 8 microbatches": ({PIPELINE: 2, "pipeline": {"microbatches": 8}}, {}),
}


def training(steps: int, changes: dict[str, Any]) -> dict[str, Any]:
    config = {"layers": 8, "heads": 4, "width": 256, "tieWeights": False}
    return {
        "model": {"name": "gpt", "config": config},
        "data": {"name": "synthetic", "config": {"kind": "Tokens", "size": 256, "sequenceLength": 128}},
        "steps": WARM + steps,
        "globalBatchSize": 16,
        "logging": {"interval": 1},
        "checkpoint": {"interval": WARM + steps},
        **changes,
    }


def estimated(job: DistTrainingJob, machine: Machine) -> float:
    """Seconds of a step of the slowest rank."""
    works = [rank_memory(job, rank).work for rank in pipeline_ranks(job)]
    return max(step_time(work, machine).total for work in works if work is not None)


def measured_network(folder: Path) -> Path:
    """What `disttrain collectives` says of this machine."""
    file = folder / "collectives.json"
    command = [sys.executable, "-m", "disttrain.main", "collectives", "--ranks", str(RANKS), "--json"]
    with file.open("w") as out:
        subprocess.run([*command, "--sizes", "1Ki,4Mi"], stdout=out, check=True)
    return file


def manifest(described: dict[str, Any]) -> DistTrainingJob:
    spec = {"workers": {"replicas": 1, "processesPerPod": RANKS}, "storage": {"claimName": "given"}}
    spec |= {key: described[key] for key in ("parallelism", "training")}
    return of_object({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "benchmark"}, "spec": spec})


def measure(quick: bool) -> Iterator[harness.Row]:
    steps, repeats = (3, 1) if quick else (10, 3)
    jobs = {name: ranks.job(training(steps, changes), layout) for name, (layout, changes) in LAYOUTS.items()}
    with tempfile.TemporaryDirectory() as folder:
        given = Given(collectives=str(measured_network(Path(folder))))
        machine = machine_of(given, manifest(jobs["dp2"]).spec)
    yield harness.row("FLOP/s of a rank", "GFLOP/s", [machine.flops / 1e9])
    estimates = {name: estimated(manifest(job), machine) for name, job in jobs.items()}
    real = {}
    for name, job in jobs.items():
        lines = [line for _ in range(repeats) for line in ranks.train(job, RANKS)[WARM:]]
        seconds = [line["time_metrics/end_to_end(s)"] for line in lines]
        real[name] = statistics.median(seconds)
        yield harness.row(f"{name}: estimate, measured", "s a step", [estimates[name]], seconds)
    chosen = min(estimates, key=lambda name: estimates[name])
    yield harness.row(f"chosen: {chosen}, beside the fastest", "s a step", [real[chosen]], [min(real.values())])
    slowest = max(real.values())
    yield harness.row("the slowest, beside the fastest", "s a step", [slowest], [min(real.values())])


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch",))
