"""Data that keep every rank of a job in the middle of its training until a test lets them go on."""

import time
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from tests.unit.trainer.user_code import double_samples


class Gated(Dataset):
    """Samples, of which a process gets no more than `after` before `go` is in the folder."""

    def __init__(self, inner: Dataset, folder: Path, after: int) -> None:
        self.inner, self.folder, self.left = inner, folder, after

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.left -= 1
        while self.left < 0 and not (self.folder / "go").exists():
            time.sleep(0.01)
        return self.inner[index]


def gated_samples(folder: str, after: int) -> tuple[Dataset, Dataset]:
    """`double_samples` behind a gate."""
    training, held_out = double_samples()
    return Gated(training, Path(folder), after), held_out
