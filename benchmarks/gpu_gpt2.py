"""GPT-2 124M on one GPU: tokens per second, model FLOPs utilisation and highest memory of the trainer.

The built-in gpt (12 layers, 12 heads, 768 wide, sequences of 1,024 random tokens, vocabulary 50,304, tied), BF16,
compiled. Reference: the same model compiled as a whole in a bare loop (gpu_bare_loop.py). Goal on an H200: 460,000
tokens per second. Without a GPU it says so and ends with code 2.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "trainer_image")]

from benchmarks import harness, ranks

NO_GPU = 2
WINDOW = 10
# The first steps compile, and the allocator finds its size.
WARM = 2 * WINDOW
MICRO_BATCHES = (16, 32, 64)
# Dense BF16, without sparsity, from the vendor's datasheets; by a part of the name that CUDA gives.
PEAK_FLOPS = {"H200": 989e12, "H100 80GB HBM3": 989e12, "A100": 312e12}


@dataclass(frozen=True)
class Shape:
    """Sizes of a gpt."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    tokens: int = 1024
    vocabulary: int = 50304

    @property
    def parameters(self) -> int:
        """Numbers that are multiplied with: all but the embedding of positions; tied ones once."""
        block = 12 * self.width**2 + 13 * self.width
        return self.vocabulary * self.width + self.layers * block + 2 * self.width

    @property
    def flops_per_token(self) -> int:
        """6 N + 12 L H Q T, forward and backward (Chowdhery et al. 2022, PaLM, appendix B)."""
        return 6 * self.parameters + 12 * self.layers * self.width * self.tokens


@dataclass(frozen=True)
class Measured:
    """Medians of a run."""

    seconds: float
    """Per step."""
    memory: float
    """Most that was reserved, in GiB."""


def peak_flops(name: str) -> float | None:
    """Operations per second of the GPU that CUDA calls so; None where they are not known here."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def job(shape: Shape, micro: int, steps: int) -> dict[str, Any]:
    """job.json of WARM + steps steps."""
    sizes = {"layers": shape.layers, "heads": shape.heads, "width": shape.width}
    data = {"samples": 64 * micro, "length": shape.tokens, "vocabulary": shape.vocabulary}
    training = {
        "model": {
            "name": "gpt",
            "config": sizes | {"sequenceLength": shape.tokens, "vocabularySize": shape.vocabulary, "tieWeights": True},
        },
        "data": {"entrypoint": "benchmarks.random_tokens:tokens", "config": data},
        "optimizer": {"name": "AdamW", "learningRate": 0.0006},
        "steps": WARM + steps,
        "microBatchSize": micro,
        "maxGradientNorm": 1.0,
        "precision": "BF16",
        "compile": True,
        "logging": {"interval": WINDOW, "tensorBoard": False},
        # One checkpoint, after the last step and outside of what is measured.
        "checkpoint": {"interval": WARM + steps},
    }
    return ranks.job(training)


def ours(described: dict[str, Any]) -> Measured:
    """The trainer, as the agent starts it."""
    lines = ranks.train(described, 1)
    seconds = [line["time_metrics/end_to_end(s)"] for line in lines if line["step"] > WARM]
    memory = next(value for key, value in lines[-1].items() if key.startswith("memory/"))
    return Measured(statistics.median(seconds), memory)


def bare(described: dict[str, Any]) -> Measured:
    """The bare loop."""
    measured = described["training"]["steps"] - WARM
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "job.json"
        file.write_text(json.dumps(described))
        printed = ranks.run(folder, "benchmarks.gpu_bare_loop", 1, str(file), str(WARM), str(measured), str(WINDOW))
    *seconds, memory = map(float, printed.split())
    return Measured(statistics.median(seconds), memory)


def rows(shape: Shape, micro: int, steps: int, peak: float | None) -> Iterator[harness.Row]:
    """Trainer and bare loop in turn, with one micro batch per step. peak: operations per second of the GPU."""
    described = job(shape, micro, steps)
    reference, found = bare(described), ours(described)
    speeds = [micro * shape.tokens / run.seconds for run in (found, reference)]
    yield harness.Row(f"micro batch {micro}: throughput", speeds[0], "tokens/s", speeds[1])
    if peak is not None:
        used = [100 * shape.flops_per_token * speed / peak for speed in speeds]
        yield harness.Row(f"micro batch {micro}: model FLOPs utilisation", used[0], "%", used[1])
    yield harness.Row(f"micro batch {micro}: highest memory", found.memory, "GiB", reference.memory)


def measure(quick: bool) -> Iterator[harness.Row]:
    import torch  # a second, and `--help` needs none of it

    if not torch.cuda.is_available():
        print("gpu_gpt2.py measures a GPU, and torch.cuda.is_available() is false here: nothing done", file=sys.stderr)
        sys.exit(NO_GPU)
    name = torch.cuda.get_device_name()
    print(f"gpu {name}")
    for micro in (32,) if quick else MICRO_BATCHES:
        yield from rows(Shape(), micro, 3 * WINDOW if quick else 5 * WINDOW, peak_flops(name))


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch", "triton"))
