"""Data of a user whose code ends the process, or raises."""

import os
import sys

from torch import Tensor
from torch.utils.data import Dataset

from tests.unit.trainer.user_code import double_samples


class Ending(Dataset):
    """Ends its rank at one of its samples: by an exception, or by leaving."""

    def __init__(self, inner: Dataset, how: str, at: int, rank: int) -> None:
        self.inner, self.how, self.at, self.rank = inner, how, at, rank

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.at and os.environ["RANK"] == str(self.rank):
            if self.how == "raise":
                raise ValueError("a sample that cannot be read")
            if self.how == "exit":
                sys.exit(0)
            os._exit(0)
        return self.inner[index]


def ending_samples(how: str, at: int = 30, rank: int = 0, size: int = 500) -> tuple[Dataset, Dataset]:
    """how: "raise", "exit" (sys.exit) or "leave" (os._exit). at: the sample."""
    training, held_out = double_samples(size)
    return Ending(training, how, at, rank), held_out
