"""GPT-2 124M on one GPU: tokens per second, model FLOPs utilisation and highest memory of the trainer.

The built-in gpt (12 layers, 12 heads, 768 wide, sequences of 1,024 random tokens, vocabulary 50,304, tied, without
biases), BF16, compiled. Reference: a plain loop with a model of its own (gpu_plain_loop.py), compiled as a whole. Goal:
no slower than that; on an H100 505,000 tokens per second. Without a GPU it says so and ends with code 2.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "trainer_image")]

from benchmarks import harness, ranks

NO_GPU = 2
WINDOWS = 5
RUN_SECONDS = 120.0
"""After which a run is ended: what hangs costs its own rows."""
BATCHES = ((32, 1), (64, 1), (32, 8))
"""Samples of a micro batch, and micro batches of a step."""
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
        block = 12 * self.width**2 + 2 * self.width
        return self.vocabulary * self.width + self.layers * block + self.width

    @property
    def flops_per_token(self) -> int:
        """Forward and backward."""
        return flops_per_token(self.parameters, self.layers, self.width, self.tokens)


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


@dataclass(frozen=True)
class Length:
    """Steps of a run: the first ones compile, and the allocator finds its size."""

    window: int
    """Steps of one measurement."""
    warm: int
    measured: int

    @classmethod
    def of(cls, passes: int) -> "Length":
        window = 10 if passes == 1 else 2
        return cls(window, 2 * window, WINDOWS * window)


def job(shape: Shape, micro: int, passes: int, length: Length, float8: str | None = None) -> dict[str, Any]:
    """job.json. float8: how linear layers multiply in FP8; None: in BF16."""
    config = {
        "layers": shape.layers,
        "heads": shape.heads,
        "width": shape.width,
        "sequenceLength": shape.tokens,
        "vocabularySize": shape.vocabulary,
        "tieWeights": True,
        "bias": False,
    }
    data = {"samples": 64 * micro, "length": shape.tokens, "vocabulary": shape.vocabulary}
    changes = {"optimizer": {"name": "AdamW", "learningRate": 0.0006}, "gradientAccumulationSteps": passes}
    return job_of({"name": "gpt", "config": config}, data, micro, length, float8, **changes)


def job_of(
    model: dict[str, Any], data: dict[str, Any], micro: int, length: Length, float8: str | None, **changes: Any
) -> dict[str, Any]:
    """job.json of a language model in BF16, compiled, with random tokens."""
    steps = length.warm + length.measured
    training = {
        "model": model,
        "data": {"entrypoint": "benchmarks.random_tokens:tokens", "config": data},
        "steps": steps,
        "microBatchSize": micro,
        "maxGradientNorm": 1.0,
        "precision": "BF16",
        "compile": True,
        "logging": {"interval": length.window, "tensorBoard": False},
        # One checkpoint, after the last step and outside of what is measured.
        "checkpoint": {"interval": steps},
        **changes,
    }
    if float8 is not None:
        training["float8"] = float8
    return ranks.job(training)


def flops_per_token(parameters: int, layers: int, width: int, tokens: int) -> int:
    """6 N + 12 L H Q T, forward and backward (Chowdhery et al. 2022, PaLM, appendix B)."""
    return 6 * parameters + 12 * layers * width * tokens


def ours(described: dict[str, Any], length: Length) -> Measured:
    """The trainer, as the agent starts it."""
    lines = ranks.train(described, 1, seconds=RUN_SECONDS)
    seconds = [line["time_metrics/end_to_end(s)"] for line in lines if line["step"] > length.warm]
    memory = next(value for key, value in lines[-1].items() if key.startswith("memory/"))
    return Measured(statistics.median(seconds), memory)


def plain(described: dict[str, Any], length: Length) -> Measured:
    """The plain loop."""
    numbers = map(str, (length.warm, length.measured, length.window))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "job.json"
        file.write_text(json.dumps(described))
        printed = ranks.run(folder, "benchmarks.gpu_plain_loop", 1, str(file), *numbers, seconds=RUN_SECONDS)
    *seconds, memory = map(float, printed.split())
    return Measured(statistics.median(seconds), memory)


@cache
def plain_of(shape: Shape, micro: int, passes: int) -> Measured:
    """The plain loop, which runs once for all that is compared with it."""
    length = Length.of(passes)
    return plain(job(shape, micro, passes, length), length)


def rows(shape: Shape, micro: int, passes: int, peak: float | None, float8: str | None = None) -> Iterator[harness.Row]:
    """Trainer and plain loop, which computes in BF16, in turn. peak: operations per second of the GPU."""
    length = Length.of(passes)
    reference = plain_of(shape, micro, passes)
    found = ours(job(shape, micro, passes, length, float8), length)
    name = f"micro batch {micro}" + (f", {passes} a step" if passes > 1 else "") + (f", FP8 {float8}" if float8 else "")
    speeds = [passes * micro * shape.tokens / run.seconds for run in (found, reference)]
    yield harness.Row(f"{name}: throughput", speeds[0], "tokens/s", speeds[1])
    if peak is not None:
        used = [100 * shape.flops_per_token * speed / peak for speed in speeds]
        yield harness.Row(f"{name}: model FLOPs utilisation", used[0], "%", used[1])
    yield harness.Row(f"{name}: highest memory", found.memory, "GiB", reference.memory)


def measure(quick: bool) -> Iterator[harness.Row]:
    import torch  # a second, and `--help` needs none of it

    if not torch.cuda.is_available():
        print("gpu_gpt2.py measures a GPU, and torch.cuda.is_available() is false here: nothing done", file=sys.stderr)
        sys.exit(NO_GPU)
    name = torch.cuda.get_device_name()
    print(f"gpu {name}")
    configurations: list[tuple[int, int, str | None]] = [(*batch, None) for batch in BATCHES[: 1 if quick else None]]
    if importlib.util.find_spec("torchao") is None:
        print("FP8 is not measured: torchao is not installed", file=sys.stderr)
    elif not quick:
        configurations.append((*BATCHES[0], "Rowwise"))
    failed = False
    for micro, passes, float8 in configurations:
        try:
            yield from rows(Shape(), micro, passes, peak_flops(name), float8)
        except ranks.RanksFailed as error:
            failed = True
            print(f"micro batch {micro}, {passes} a step, {float8 or 'BF16'}: {error}", file=sys.stderr)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch", "triton"))
