"""Data of a user that draw from all generators, fail while they are read, or are spoilt."""

import os
import random
import signal
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from tests.unit.trainer.user_code import double_samples


class Drawn(Dataset):
    """Samples with noise on top, some with another class, whose draws no rank may see otherwise than its peers."""

    def __init__(self, samples: Dataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, target = self.samples[index]
        noise = torch.randn(6, dtype=torch.float64) + torch.from_numpy(np.random.normal(size=6))
        return x + 0.1 * noise, target if random.random() < 0.7 else torch.tensor(random.randrange(5))


class UnpicklableError(ValueError):
    """An error that does not travel."""

    def __init__(self, message: str, hook: Any) -> None:
        super().__init__(message)
        self.hook = hook


class Failing(Drawn):
    """Samples of which one cannot be read."""

    def __init__(self, samples: Dataset, how: str) -> None:
        super().__init__(samples)
        self.how = how

    def __getitem__(self, index: int) -> Any:
        x, target = super().__getitem__(index)
        if index != 7:
            return x, target
        if self.how == "raises":
            raise LookupError("sample 7 is nowhere")
        if self.how == "raises what does not travel":
            raise UnpicklableError("sample 7 is nowhere", lambda: None)
        if self.how == "leaves":
            raise SystemExit(9)
        if self.how == "is killed" and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(3), target


def drawn() -> tuple[Dataset, Dataset]:
    training, held_out = double_samples()
    return Drawn(training), Drawn(held_out)


def failing(how: str) -> tuple[Dataset, None]:
    return Failing(double_samples()[0], how), None


def spoilt_samples(factor: float | str, of_all: bool = False) -> tuple[Dataset, Dataset]:
    """`double_samples`, the inputs of one of them, or of all, multiplied by a number."""
    training, held_out = double_samples()
    inputs, targets = (tensor.clone() for tensor in training.tensors)
    inputs[slice(None) if of_all else 30] *= float(factor)
    return TensorDataset(inputs, targets), held_out
