"""Data of a user that hold every rank until a file is there, and note what kind of process it is."""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from tests.unit.trainer.user_code import double_samples

_PR_GET_PDEATHSIG = 2


def dies_by() -> int:
    """The signal that this process gets when its parent dies."""
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value


def descriptors() -> list[Path]:
    """What this process has open; the folder that is read here is no longer."""
    return [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


def facts() -> dict[str, object]:
    """What a rank can see of its process."""
    return {
        "rank": os.environ["RANK"],
        "name": Path("/proc/self/comm").read_text().strip(),
        "parent": os.getppid(),
        "dies by": dies_by(),
        "has its output open": [path.readlink() for path in descriptors()].count(Path("/proc/self/fd/1").readlink()),
        "leads its group": os.getpgrp() == os.getpid(),
        "input": str(Path("/proc/self/fd/0").readlink()),
        "main": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
        "arguments": sys.argv[1:],
        # torch sets some of these when it is imported.
        "variables": sorted(name for name in os.environ if not name.startswith("TORCHINDUCTOR_")),
    }


class Held(Dataset):
    """Samples, of which a process gets no more than `left` before the file is there."""

    def __init__(self, inner: Dataset, left: int, file: Path) -> None:
        self.inner, self.left, self.file = inner, left, file

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.left -= 1
        while self.left < 0 and not self.file.exists():
            time.sleep(0.01)
        return self.inner[index]


def held_samples(samples: int, folder: str) -> tuple[Dataset, Dataset]:
    """Both sets of `double_samples`."""
    (Path(folder) / f"rank.{os.getpid()}").write_text(json.dumps(facts()))
    training, held_out = double_samples()
    return Held(training, samples, Path(folder) / "on"), held_out
