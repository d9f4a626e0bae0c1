"""Seconds that `disttrain plan` takes for a Llama of 70 billion parameters on 64 ranks: tp8 x pp4 x fsdp2.

The first and the last stage of the pipeline, each in a process of its own, as `--rank` asks for them. Goal: a minute
for a rank. Beside it: the memory of the process that estimates, and what it says of the rank.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / part) for part in (".", "api", "cli", "operator", "trainer_image")]

from benchmarks import harness
from disttrain.planning.memory import rank_memory
from disttrain_api.manifest import of_object
from disttrain_api.names import API_VERSION, KIND
from disttrain_api.spec import DistTrainingJob

GOAL_SECONDS = 60.0
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
PARALLELISM = {
    "tensorParallelDegree": 8,
    "sequenceParallel": True,
    "pipelineParallelDegree": 4,
    "dataParallelShardDegree": 2,
    "pipeline": {"schedule": "1F1B", "microbatches": 8},
}


def manifest(layers: int) -> DistTrainingJob:
    config = {"config": LLAMA | {"num_hidden_layers": layers}, "sequenceLength": 4096}
    training = {
        "model": {"name": "transformers", "config": config},
        "data": {"name": "synthetic", "config": {"kind": "Tokens", "size": 64, "sequenceLength": 4096}},
        "optimizer": {"name": "AdamW", "learningRate": 0.0001},
        "precision": "BF16",
        "activationCheckpointing": "Full",
        "steps": 100,
        "globalBatchSize": 16,
    }
    spec = {
        "workers": {"replicas": 8, "processesPerPod": 8},
        "storage": {"claimName": "given"},
        "parallelism": PARALLELISM,
        "training": training,
    }
    return of_object({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "benchmark"}, "spec": spec})


def measure(quick: bool) -> Iterator[harness.Row]:
    job = manifest(layers=80)
    for rank in (0,) if quick else (0, 63):
        begin = time.perf_counter()
        found = rank_memory(job, rank)
        seconds = time.perf_counter() - begin
        assert found.peak is not None, found.unknown
        yield harness.row(f"rank {rank} of 64: estimate, beside the goal", "s", [seconds], [GOAL_SECONDS])
        yield harness.row(f"rank {rank}: peak of a step", "GiB", [found.peak / 2**30])
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    yield harness.row("memory of the process that estimates", "GiB", [most / 2**20])


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch", "transformers"))
