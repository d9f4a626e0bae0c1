"""The digits, which hold every rank in the middle of its training until it gets SIGTERM. A module of a user's."""

import os
import signal
import threading
import time
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from disttrain_api.builtin import DigitsConfig
from disttrain_trainer.data.digits import load
from disttrain_trainer.survivors import survivor


class Held(Dataset):
    """Samples, of which a process gets no more than `samples` before SIGTERM."""

    def __init__(self, inner: Dataset, samples: int) -> None:
        self.inner, self.left, self.stopped = inner, samples, threading.Event()
        # The trainer receives signals in another way.
        signal.signal(signal.SIGTERM, lambda *_: self.stopped.set())

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.left -= 1
        while self.left < 0 and not self.stopped.wait(0.01):
            pass
        return self.inner[index]


def digits(samples: int, attempts: int) -> tuple[Dataset, Dataset]:
    """Both sets of the digits; the first so many attempts are held."""
    found = load(DigitsConfig())
    held = int(os.environ["DISTTRAIN_ATTEMPT"]) <= attempts
    return Held(found.training, samples) if held else found.training, found.held_out


class HeldUntil(Dataset):
    """Samples, of which a process gets no more than `samples` before a file is there, or SIGTERM has come."""

    def __init__(self, inner: Dataset, samples: int, file: Path) -> None:
        self.inner, self.left, self.file, self.stopped = inner, samples, file, threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self.stopped.set())

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.left -= 1
        while self.left < 0 and not self.file.exists() and not self.stopped.wait(0.01):
            pass
        return self.inner[index]


class PacedUntil(HeldUntil):
    """The same, and each sample takes a millisecond before the file is there."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not self.file.exists():
            time.sleep(0.001)
        return super().__getitem__(index)


def digits_until(samples: int, file: str, memory: int | None = None) -> tuple[Dataset, Dataset]:
    """Both sets of the digits; every process is held that the file does not let go.

    memory: bytes that the pod has left, as far as its ranks can tell; None: as many as there are.
    """
    if memory is not None:
        survivor.memory_available = lambda: memory
    found = load(DigitsConfig())
    return HeldUntil(found.training, samples, Path(file)), found.held_out


def paced_digits_until(samples: int, file: str) -> tuple[Dataset, Dataset]:
    """The same, at a pace at which a step can be met anywhere in it."""
    found = load(DigitsConfig())
    return PacedUntil(found.training, samples, Path(file)), found.held_out
