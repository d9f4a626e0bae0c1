"""A user's model and data that do now and then what takes long and is no hang. A module of its job's.

All ranks compile at once, one rank compiles alone, one rank reads a sample that takes seconds, and what is held out
takes ten times as long as what is trained on. Each is written down in the file DONE.
"""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

DONE = Path("done")
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SAMPLE_SECONDS, HELD_OUT_SECONDS, LONG_SAMPLE_SECONDS = 0.02, 0.2, 6.0
EVERY_COMPILES, ONE_COMPILES, LONG_SAMPLE = 700, 450, 1100
"""In how many passes or samples of a rank each happens once."""


def note(what: str) -> None:
    with DONE.open("a") as file:
        file.write(f"{what} {RANK}\n")


def compiled(size: int) -> None:
    """Compile a function of this shape, for which nothing is kept."""
    begun = time.monotonic()
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.LayerNorm(size)) for _ in range(4)))
    with torch.random.fork_rng(), torch.compiler.config.patch(force_disable_caches=True):
        torch.compile(layers, dynamic=False)(torch.ones(size, size)).sum().backward()
    torch.compiler.reset()
    note(f"compiled in {time.monotonic() - begun:.0f} s by")


class Model(nn.Module):
    """A perceptron, with enough parameters that a checkpoint takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.register_buffer("ballast", torch.zeros(2**24))
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            if self.passes % EVERY_COMPILES == 0:
                compiled(64 + self.passes // EVERY_COMPILES)
            if self.passes % ONE_COMPILES == 0 and self.passes // ONE_COMPILES % RANKS == RANK:
                compiled(32 + self.passes // ONE_COMPILES)
        return self.layers(inputs)


class Samples(Dataset):
    """Samples that take some time each, and now and then seconds."""

    def __init__(self, seconds: float, count: int) -> None:
        self.seconds, self.count, self.read = seconds, count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        long = self.read % LONG_SAMPLE == 0 and self.read // LONG_SAMPLE % RANKS == RANK
        if long:
            note("read a long sample")
        time.sleep(LONG_SAMPLE_SECONDS if long else self.seconds)
        return torch.full((8,), index / self.count), torch.tensor(index % 4)


def model() -> nn.Module:
    return Model()


def data() -> tuple[Dataset, Dataset]:
    return Samples(SAMPLE_SECONDS, 100_000), Samples(HELD_OUT_SECONDS, 200)
