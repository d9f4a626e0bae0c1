"""What the trainer's loop or a session costs beside a bare PyTorch loop: tokens per second of both, two ranks on gloo.

Same model, data, optimizer and torch calls (benchmarks/bare_loop.py; a model of transformers is the library's own
there), ten steps each in turn in the same processes: machines change their speed by more than what is measured here.
Two bare loops beside each other differ, too: by up to 6 % for as long as their processes live, and the one that is
built first is slower by 1 to 2 % on the median. So the processes are started several times, and each loop is built
first in half of them. Goal: at least 0.97 of the bare loop's.
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

RANKS, TOKENS, EXPERTS = 2, 128, 4
STARTS, BLOCKS = 6, 5
"""Times that the processes are started, and blocks in each."""
STRATEGIES = {
    "DDP": {},
    "DDP, static graph": {"dataParallel": {"staticGraph": True}},
    "FSDP2": {"dataParallelShardDegree": RANKS},
    "expert parallel": {"dataParallelShardDegree": RANKS, "expertParallelDegree": RANKS},
    "tensor parallel": {"tensorParallelDegree": RANKS},
    "pipeline, 1F1B": {"pipelineParallelDegree": RANKS, "pipeline": {"microbatches": 2 * RANKS}},
    "DDP, a task": {},
    "DDP, a session": {},
    "DDP, transformers": {},
    "FSDP2, transformers": {"dataParallelShardDegree": RANKS},
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": TOKENS,
}


def job(parallelism: dict[str, Any], steps: int, llama: bool = False) -> dict[str, Any]:
    """job.json of a GPT, or of a Llama of transformers, that computes for some tens of milliseconds per step."""
    config: dict[str, Any] = {"layers": 4, "heads": 4, "width": 128, "tieWeights": False}
    if "expertParallelDegree" in parallelism:
        config |= {"experts": EXPERTS, "expertsPerToken": 2}
    training = {
        "model": {"name": "transformers", "config": {"config": LLAMA}} if llama else {"name": "gpt", "config": config},
        "data": {
            "name": "synthetic",
            "config": {"kind": "Tokens", "sequenceLength": TOKENS, "size": 4096, "heldOutFraction": 0.01},
        },
        "optimizer": {"name": "AdamW", "learningRate": 0.001},
        "steps": steps,
        "microBatchSize": 8,
        "checkpoint": {"interval": steps},
    }
    return ranks.job(training, parallelism)


def as_task(described: dict[str, Any]) -> dict[str, Any]:
    """The job with its model, data and loss as a task."""
    named = described["training"]
    task = {"entrypoint": "benchmarks.overhead_task:Language", "config": {"named": named}}
    return described | {"training": {key: named[key] for key in named.keys() - {"model", "data"}} | {"task": task}}


def in_turn(name: str, parallelism: dict[str, Any], blocks: int, first: str) -> list[tuple[float, float]]:
    """Seconds per step of our loop and of the bare one, of each block of steps. first: which is built first."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # More steps than there will be: the last one also evaluates and saves.
        bare = job(parallelism, 100 * (blocks + 1), name.endswith("transformers"))
        (folder / "bare.json").write_text(json.dumps(bare))
        (folder / "job.json").write_text(json.dumps(as_task(bare) if name.endswith("task") else bare))
        loop = "session" if name.endswith("session") else "trainer"
        printed = ranks.run(folder, "benchmarks.overhead_rank", RANKS, str(blocks), loop, first)
    pairs = [line.split()[1:] for line in printed.splitlines() if line.startswith("block ")]
    return [(float(ours), float(bare)) for ours, bare in pairs]


def measure(quick: bool, only: str | None = None) -> Iterator[harness.Row]:
    for name, parallelism in STRATEGIES.items():
        if only not in (None, name):
            continue
        # Microbatches of 8 sequences: one for each replica, or as many as flow through the pipeline.
        cut = "tensorParallelDegree" in parallelism
        tokens = 8 * TOKENS * (1 if cut else parallelism.get("pipeline", {}).get("microbatches", RANKS))
        starts, blocks = (2, 2) if quick else (STARTS, BLOCKS)
        firsts = [("ours", "bare")[start % 2] for start in range(starts)]
        pairs = [pair for first in firsts for pair in in_turn(name, parallelism, blocks, first)]
        values, references = ([tokens / seconds for seconds in column] for column in zip(*pairs, strict=True))
        yield harness.row(f"{name}: throughput", "tokens/s", values, references)
        ratios = [bare / ours for ours, bare in pairs]
        yield harness.row(f"{name}: of the bare loop's beside it", "x", ratios)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch",), parts=STRATEGIES)
