"""Data that keep every rank of a job in the middle of its training until a test lets them go on."""

import time
from itertools import count
from pathlib import Path

from torch.utils.data import Dataset

from tests.unit.trainer.user_code import Before, double_samples


def gated_samples(folder: str, after: int) -> tuple[Dataset, Dataset]:
    """`double_samples`, of which a process gets no more than `after` before `go` is in the folder."""
    calls = count(1)

    def wait(index: int) -> None:
        if next(calls) > after:
            while not Path(folder, "go").exists():
                time.sleep(0.01)

    training, held_out = double_samples()
    return Before(training, wait), held_out
