"""Tokens per second and held-out loss beside nanoGPT (github.com/karpathy/nanoGPT), in its setting for small machines.

Characters of the standard library's sources, block 64, batch 12 per rank, 4 layers, 4 heads, 128 wide, no biases, 2000
iterations on CPUs; with one rank and with two. Programs take turns. NANOGPT names a checkout. Goals: at least its
throughput, and no higher loss.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / part) for part in (".", "api", "cli", "trainer_image")]

from benchmarks import harness, ranks
from disttrain.corpora.prepare import prepare
from disttrain.corpora.settings import Settings

BLOCK, BATCH, RATE = 64, 12, 1e-3
CHARACTERS = 2_000_000
EVALUATED = 200
"""Batches by which nanoGPT estimates its loss."""


class Result(NamedTuple):
    """What a run came to."""

    tokens_per_second: float
    held_out_loss: float


def write_data(folder: Path, checkout: Path) -> int:
    """Write the same text for both, whose last tenth is held out; return the size of its vocabulary."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(source.read_text("utf-8", errors="ignore") for source in sources)[:CHARACTERS]
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = np.array([numbers[character] for character in text], np.uint16)
    data = checkout / "data" / "stdlib"
    data.mkdir(parents=True)
    cut = len(tokens) * 9 // 10
    tokens[:cut].tofile(data / "train.bin")
    tokens[cut:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(numbers)}))
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=text[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text(text)
    prepare(Settings((folder / "text.txt",), str(folder / "tokenizer.json"), folder / "corpus"))
    return len(numbers)


def nanogpt(checkout: Path, world: int, steps: int) -> Result:
    """Run its train.py; with several ranks on CPUs, which it does not offer by itself."""
    script = (checkout / "train.py").read_text()
    for gpu, cpu in (
        ("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
        ("torch.cuda.set_device(device)", "pass"),
        ("DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"),
    ):
        assert gpu in script, gpu
        script = script.replace(gpu, cpu)
    (checkout / "train_cpu.py").write_text(script)
    flags = {
        "dataset": "stdlib",
        "device": "cpu",
        "compile": False,
        "backend": "gloo",
        "eval_iters": EVALUATED,
        "eval_interval": steps,
        "block_size": BLOCK,
        "batch_size": BATCH,
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 128,
        "max_iters": steps,
        "lr_decay_iters": steps,
        "dropout": 0.0,
        "gradient_accumulation_steps": world,
    }
    launch = [] if world == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    config = [f"--{name}={value}" for name, value in flags.items()]
    printed = subprocess.run(
        [sys.executable, *launch, "train_cpu.py", "config/train_shakespeare_char.py", *config],
        cwd=checkout,
        env=os.environ | {"OMP_NUM_THREADS": str(threads(world))},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    seconds = [float(found) / 1000 for found in re.findall(r"^iter \d+: .* time ([\d.]+)ms", printed, re.M)]
    losses = re.findall(r"val loss ([\d.]+)", printed)
    return Result(world * BATCH * BLOCK / statistics.median(seconds[5:]), float(losses[-1]))


def threads(world: int) -> int:
    """Return the threads of a rank: all ranks together have one per processor."""
    return max(len(os.sched_getaffinity(0)) // world, 1)


def ours(folder: Path, world: int, steps: int, vocabulary: int) -> Result:
    """Run the trainer."""
    shape = {"vocabularySize": vocabulary, "layers": 4, "heads": 4, "width": 128, "bias": False, "activation": "Gelu"}
    data = {"path": str(folder / "corpus"), "sequenceLength": BLOCK, "heldOutFraction": 0.1}
    optimizer = {"name": "AdamW", "learningRate": RATE, "beta2": 0.99, "weightDecay": 0.1, "weightDecayOn": "Matrices"}
    training: dict[str, Any] = {
        "model": {"name": "gpt", "config": shape},
        "data": {"name": "corpus", "config": data},
        "optimizer": optimizer,
        "lrSchedule": {"name": "Cosine", "warmupSteps": 100, "minimumRatio": 0.1},
        "steps": steps,
        "microBatchSize": BATCH,
        "maxGradientNorm": 1.0,
        "evaluation": {"batchSize": 64},
        "checkpoint": {"interval": steps},
    }
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "job.json").write_text(json.dumps(ranks.job(training)))
        ranks.run(place, "disttrain_trainer", world, threads=threads(world))
        found = (place / "benchmark" / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in found]
    speeds = [line["throughput(sps)"] for line in lines if "throughput(sps)" in line]
    losses = [loss for line in lines if (loss := line.get("validation_metrics/global_avg_loss")) is not None]
    return Result(statistics.median(speeds[1:]) * BLOCK, losses[-1])


def measure(quick: bool) -> Iterator[harness.Row]:
    """Both take turns, so that what else the machine does is borne by both."""
    steps, repeats = (300, 1) if quick else (2000, 3)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkout = folder / "nanogpt"
        shutil.copytree(os.environ["NANOGPT"], checkout)
        vocabulary = write_data(folder, checkout)
        for world in (1, 2):
            pairs = [(ours(folder, world, steps, vocabulary), nanogpt(checkout, world, steps)) for _ in range(repeats)]
            for number, (name, unit) in enumerate((("throughput", "tokens/s"), ("held-out loss", "nats"))):
                values, references = ([result[number] for result in side] for side in zip(*pairs, strict=True))
                yield harness.row(f"{world} rank{'s' * (world > 1)}: {name}", unit, values, references)


if __name__ == "__main__":
    if "NANOGPT" not in os.environ:
        sys.exit("NANOGPT must name a checkout of github.com/karpathy/nanoGPT")
    harness.main(__doc__, measure, ("torch",))
