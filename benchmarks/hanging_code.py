"""A user's model and data, whose rank misbehaves as soon as the file FAULT says so: "KIND RANK". A module of its job's.

Collective: the rank enters a barrier that the others do not. Loader: each of its samples takes longer.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

FAULT = "fault"
SAMPLE_SECONDS = 0.002
SLOW_SAMPLE_SECONDS = 0.02


def is_faulty(kind: str) -> bool:
    """Whether this rank is to misbehave so."""
    path = Path(FAULT)
    return path.exists() and path.read_text() == f"{kind} {os.environ['RANK']}"


class Model(nn.Module):
    """A perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        if is_faulty("collective"):
            dist.barrier()
        return self.layers(inputs)


class Samples(Dataset):
    """Samples of which each takes some time."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(SLOW_SAMPLE_SECONDS if is_faulty("loader") else SAMPLE_SECONDS)
        return torch.full((8,), index / 4096), torch.tensor(index % 4)


def model() -> nn.Module:
    return Model()


def data(window: float | None = None) -> tuple[Dataset, None]:
    """window: seconds of a window in which the trainer compares its ranks, where not its own."""
    if window is not None:
        from disttrain_trainer.metrics import stragglers

        stragglers.WINDOW_SECONDS = window
    return Samples(), None
