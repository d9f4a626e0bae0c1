"""A user's module, on a pod's PYTHONPATH from a ConfigMap: samples that take their time.

Jobs that train until something is done to them would otherwise take the processors of what is done.
"""

import os
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from disttrain_api.builtin import SyntheticConfig
from disttrain_trainer.data import synthetic
from disttrain_trainer.data.sampler import permute

SIDE = 8


class Slow(Dataset[tuple[Tensor, Any]]):
    """The samples of another one, each some seconds later."""

    def __init__(self, seconds: float, inner: Any) -> None:
        self.seconds, self.inner = seconds, inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        time.sleep(self.seconds)
        image, kind = self.inner[index]
        return image, kind


def images(seconds: float) -> tuple[Slow, Any]:
    """1,024 images [1, 8, 8] of ten kinds, the held-out ones at once."""
    config = SyntheticConfig.model_validate({"kind": "Images", "size": 1024, "height": SIDE, "width": SIDE})
    found = synthetic.load(config)
    return Slow(seconds, found.training), found.held_out


def spoilt(first: int, end: int) -> tuple[TensorDataset, TensorDataset]:
    """240 images [1, 8, 8] of four kinds; those at positions from `first` to before `end` of the first epoch are not
    a number, of a job whose seed is 0."""
    images, kinds = torch.randn(240, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0)), torch.arange(240) % 4
    images[permute(np.arange(first, end), 240, 0, 0)] = float("nan")
    return TensorDataset(images, kinds), TensorDataset(images[:0], kinds[:0])


class Pausing(Slow):
    """The same; one sample of rank 1, the `after`-th, takes `pause` seconds."""

    def __init__(self, inner: Slow, after: int, pause: float) -> None:
        super().__init__(inner.seconds, inner.inner)
        self.left, self.pause = after, pause

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        self.left -= 1
        if self.left == 0 and os.environ["RANK"] == "1":
            print(f"rank 1 waits {self.pause} s for a sample", flush=True)
            time.sleep(self.pause)
        return super().__getitem__(index)


def images_late_once(seconds: float, after: int, pause: float) -> tuple[Pausing, Any]:
    """`images`, of which rank 1 gets one sample very late."""
    training, held_out = images(seconds)
    return Pausing(training, after, pause), held_out
