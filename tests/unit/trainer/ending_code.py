"""Data of a user whose code ends the process, or raises, in training or in an evaluation."""

import atexit
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO

import numpy as np
import torch
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


class HeldOut(Dataset):
    """Does something in the middle of each evaluation, on one rank."""

    def __init__(self, inner: Dataset, how: str, rank: int, folder: Path) -> None:
        self.inner, self.how, self.rank, self.folder = inner, how, rank, folder

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= len(self.inner) // 2 and os.environ["RANK"] == str(self.rank):
            self._act()
        return self.inner[index]

    def _act(self) -> None:
        if self.how == "raise":
            raise ValueError("a held-out sample that cannot be read")
        if self.how == "exit":
            sys.exit(0)
        if self.how == "kill once" and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "draw":
            torch.rand(3)
        if self.how == "wait":
            (self.folder / "evaluates").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.01)


def held_out_samples(how: str, rank: int = 0, folder: str = "") -> tuple[Dataset, Dataset]:
    """how: "raise", "exit" (sys.exit), "kill once", "draw" (random numbers), "wait" until the folder holds `go`, or any
    other word: nothing happens."""
    training, held_out = double_samples()
    return training, HeldOut(held_out, how, rank, Path(folder))


def logged_samples(folder: str, how: str = "") -> tuple[Dataset, Dataset]:
    """Samples beside a log that nobody closes and an exit handler; `ending_samples` where `how` says so."""
    log = (Path(folder) / "log").open("w")
    log.write("a line")
    OPEN.append(log)
    atexit.register((Path(folder) / "handled").touch)
    return ending_samples(how) if how else double_samples()


OPEN: list[IO[str]] = []
