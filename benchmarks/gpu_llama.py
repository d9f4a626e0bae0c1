"""A Llama of 1.2 billion parameters on one GPU, in BF16 and in FP8: tokens per second, model FLOPs utilisation, memory.

The shape of Llama 3.2 1B (16 layers, 2,048 wide, 32 heads of which 8 are of keys and values, 8,192 in the feed-forward
layers, vocabulary 128,256, tied), transformers' own model, sequences of 2,048 random tokens, AdamW, compiled. BF16 is
the reference of FP8. Needs the extras `hf` and `fp8`. Without a GPU it says so and ends with code 2.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "trainer_image")]

from benchmarks import harness
from benchmarks.gpu_gpt2 import NO_GPU, Length, Measured, flops_per_token, job_of, ours, peak_flops

MICRO = 4
FLOAT8 = (None, "Rowwise", "Tensorwise")
"""How linear layers multiply; None: in BF16."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, as its config.json calls them."""

    num_hidden_layers: int = 16
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    vocab_size: int = 128256
    max_position_embeddings: int = 2048

    @property
    def parameters(self) -> int:
        """Numbers that are multiplied with: the head is the embeddings."""
        width, narrow = self.hidden_size, self.hidden_size // self.num_attention_heads * self.num_key_value_heads
        block = 2 * width * (width + narrow) + 3 * width * self.intermediate_size + 2 * width
        return self.vocab_size * width + self.num_hidden_layers * block + width

    @property
    def flops_per_token(self) -> int:
        """Forward and backward."""
        return flops_per_token(self.parameters, self.num_hidden_layers, self.hidden_size, self.max_position_embeddings)


def job(shape: Shape, micro: int, length: Length, float8: str | None) -> dict[str, Any]:
    """job.json."""
    config = {"model_type": "llama", "tie_word_embeddings": True, **asdict(shape)}
    tokens = shape.max_position_embeddings
    model = {"name": "transformers", "config": {"config": config, "sequenceLength": tokens}}
    data = {"samples": 16 * micro, "length": tokens, "vocabulary": shape.vocab_size}
    return job_of(model, data, micro, length, float8, optimizer={"name": "AdamW", "learningRate": 0.0003})


def rows(shape: Shape, micro: int, float8: str | None, found: Measured, reference: Measured | None,
         peak: float | None) -> Iterator[harness.Row]:  # fmt: skip
    """What a run has measured. reference: the run in BF16; peak: operations per second of the GPU in BF16."""
    name = f"micro batch {micro}, {'BF16' if float8 is None else f'FP8 {float8}'}"
    speed = micro * shape.max_position_embeddings / found.seconds
    other = None if reference is None else micro * shape.max_position_embeddings / reference.seconds
    yield harness.Row(f"{name}: throughput", speed, "tokens/s", other)
    if peak is not None:
        factor = 100 * shape.flops_per_token / peak
        yield harness.Row(
            f"{name}: model FLOPs utilisation, of BF16's peak", factor * speed, "%", other and factor * other
        )
    yield harness.Row(f"{name}: highest memory", found.memory, "GiB", reference and reference.memory)


def measure(quick: bool) -> Iterator[harness.Row]:
    import torch  # a second, and `--help` needs none of it

    if not torch.cuda.is_available():
        print("gpu_llama.py measures a GPU, and torch.cuda.is_available() is false here: nothing done", file=sys.stderr)
        sys.exit(NO_GPU)
    name, shape, length = torch.cuda.get_device_name(), Shape(), Length.of(1)
    print(f"gpu {name}")
    reference = None
    for float8 in FLOAT8[:2] if quick else FLOAT8:
        if float8 is not None and importlib.util.find_spec("torchao") is None:
            print("FP8 is not measured: torchao is not installed", file=sys.stderr)
            return
        found = ours(job(shape, MICRO, length, float8), length)
        yield from rows(shape, MICRO, float8, found, reference, peak_flops(name))
        reference = reference or found


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch", "transformers", "torchao"))
