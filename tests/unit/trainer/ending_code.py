"""Data of a user whose code ends the process, or raises."""

import os
import sys

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from disttrain_trainer.data.sampler import permute
from tests.unit.trainer.user_code import double_samples

_SAMPLES = 500
# Of worlds.small().
_GLOBAL_BATCH = 24
_SEED = 0


class Ending(Dataset):
    """Ends its rank at one of its samples: by an exception, or by leaving."""

    def __init__(self, inner: Dataset, how: str, at: int, rank: int, code: int) -> None:
        self.inner, self.how, self.at, self.rank, self.code = inner, how, at, rank, code

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.at and os.environ["RANK"] == str(self.rank):
            if self.how == "raise":
                raise ValueError("a sample that cannot be read")
            if self.how == "exit":
                sys.exit(self.code)
            os._exit(self.code)
        return self.inner[index]


def ending_samples(how: str, after: int = 9, rank: int = 0, code: int = 0) -> tuple[Dataset, Dataset]:
    """how: "raise", "exit" (sys.exit) or "leave" (os._exit), in the batch after step `after`, of one rank or two."""
    training, held_out = double_samples(_SAMPLES)
    position = after * _GLOBAL_BATCH + rank * _GLOBAL_BATCH // 2
    (at,) = permute(np.array([position]), _SAMPLES, _SEED, 0).tolist()
    return Ending(training, how, at, rank, code), held_out
