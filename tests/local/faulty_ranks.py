"""A model and data of a user's own, in which a rank comes to grief once a file of that name is there.

Where it restarts it finds the file `released`, and no fault.
"""

import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from disttrain_api.builtin import DigitsConfig
from disttrain_trainer.data.digits import load

RANK = int(os.environ.get("RANK", "0"))
SLOW_SECONDS = 14


def strikes(fault: str) -> bool:
    return Path(fault).exists() and not Path("released").exists()


class Net(nn.Sequential):
    """In a deadlock rank 0 waits in one collective call and rank 1 in another one, after as many batches as the file
    says."""

    batches = 0

    def forward(self, images: Tensor) -> Tensor:
        self.batches += self.training
        if strikes("deadlock") and self.batches == int(Path("deadlock").read_text()):
            numbers, group = torch.ones(1), dist.new_group()
            if RANK == 0:
                dist.all_reduce(numbers)
            dist.broadcast(numbers, src=0, group=group)
        return super().forward(images)


def take_all() -> None:
    """Take memory until the kernel ends this process, before others of its group."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    taken = []
    while True:
        taken.append(bytearray(b"x" * 2**24))


def model() -> Net:
    return Net(nn.Flatten(), nn.Linear(64, 10))


class Faulty(Dataset):
    """The digits, at a pace at which a step can be met anywhere in it."""

    def __init__(self, inner: Dataset) -> None:
        self.inner, self.slept, self.server = inner, False, socket.socketpair()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if strikes("server"):
            self.server[0].recv(1)
        if RANK == 1 and strikes("memory"):
            Path("memory").unlink()
            take_all()
        if strikes("slow") and RANK == 1 and not self.slept:
            self.slept = True
            time.sleep(SLOW_SECONDS)
            Path("slept").touch()
        if not Path("released").exists():
            time.sleep(0.001)
        return self.inner[index]


def digits() -> tuple[Dataset, Dataset]:
    found = load(DigitsConfig())
    return Faulty(found.training), found.held_out
