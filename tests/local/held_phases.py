"""What holds rank 1 in its second evaluation or checkpoint until a file is there. A module of a user's."""

import os
import time
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from disttrain_api.builtin import DigitsConfig
from disttrain_trainer.data.digits import load

INTERVAL = 5
"""Steps between two checkpoints."""
EVERY = 6
"""Steps between two evaluations."""


def hold(file: str | None) -> None:
    """Wait on rank 1 for a file, if there is one to wait for."""
    while file is not None and os.environ["RANK"] == "1" and not Path(file).exists():
        time.sleep(0.01)


class HeldOut(Dataset):
    """Samples that are held when one is read for the second time."""

    def __init__(self, inner: Dataset, file: str) -> None:
        self.inner, self.file, self.read = inner, file, set[int]()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.read:
            hold(self.file)
        # In an evaluation an agent looks ten times a second.
        time.sleep(0.002)
        self.read.add(index)
        return self.inner[index]


def digits(file: str | None = None) -> tuple[Dataset, Dataset]:
    """Both sets of the digits."""
    found = load(DigitsConfig())
    return found.training, found.held_out if file is None else HeldOut(found.held_out, file)


class HeldSave:
    """A callback that is held at the second checkpoint."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_checkpoint(self, moment: object) -> None:
        """Before it is taken."""
        # So that an agent sees also the first one.
        time.sleep(0.5)
        if moment.step == 2 * INTERVAL:
            hold(self.file)
