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
from torch.utils.data import Dataset

from disttrain_trainer.data.sampler import permute
from tests.unit.trainer.user_code import Before, double_samples

_SAMPLES = 500
# As in worlds.small().
_GLOBAL_BATCH = 24
_SEED = 0


def ending_samples(how: str, after: int = 9, rank: int = 0, code: int = 0) -> tuple[Dataset, Dataset]:
    """how: "raise", "exit" (sys.exit) or "leave" (os._exit), in the batch after step `after`, of one rank or two."""
    training, held_out = double_samples(_SAMPLES)
    position = after * _GLOBAL_BATCH + rank * _GLOBAL_BATCH // 2
    (at,) = permute(np.array([position]), _SAMPLES, _SEED, 0).tolist()

    def end(index: int) -> None:
        if index == at and os.environ["RANK"] == str(rank):
            if how == "raise":
                raise ValueError("a sample that cannot be read")
            if how == "exit":
                sys.exit(code)
            os._exit(code)

    return Before(training, end), held_out


def act(how: str, folder: Path) -> None:
    """What happens in the middle of each evaluation."""
    if how == "raise":
        raise ValueError("a held-out sample that cannot be read")
    if how == "exit":
        sys.exit(0)
    if how == "kill once" and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "draw":
        torch.rand(3)
    if how == "wait":
        (folder / "evaluates").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)


def held_out_samples(how: str, rank: int = 0, folder: str = "") -> tuple[Dataset, Dataset]:
    """how: "raise", "exit" (sys.exit), "kill once", "draw" (random numbers), "wait" until the folder holds `go`, or any
    other word: nothing happens."""
    training, held_out = double_samples()

    def from_the_middle_on(index: int) -> None:
        if index >= len(held_out) // 2 and os.environ["RANK"] == str(rank):
            act(how, Path(folder))

    return training, Before(held_out, from_the_middle_on)


def logged_samples(folder: str, how: str = "") -> tuple[Dataset, Dataset]:
    """Samples beside a log that nobody closes and an exit handler; `ending_samples` where `how` says so."""
    log = (Path(folder) / "log").open("w")
    log.write("a line")
    OPEN.append(log)
    atexit.register((Path(folder) / "handled").touch)
    return ending_samples(how) if how else double_samples()


OPEN: list[IO[str]] = []
