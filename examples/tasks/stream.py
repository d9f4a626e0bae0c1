"""Iterable data, read file by file and never all in memory: each replica has its own files and position.

The text is the sources of Python's standard library; a small model predicts the next byte from those before it.
"""

import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_trainer.protocols import Loss, Mean


class Windows:
    """Windows of the bytes of files, one after the other; the position is a file and a place in it."""

    def __init__(self, files: list[Path], length: int) -> None:
        self.files, self.length = files, length
        self.file = self.place = 0

    def shard(self, index: int, count: int) -> "Windows":
        """Every count-th file."""
        return Windows(self.files[index::count], self.length)

    def __iter__(self) -> Iterator[Tensor]:
        while self.file < len(self.files):
            content = torch.frombuffer(bytearray(self.files[self.file].read_bytes()), dtype=torch.uint8)
            while self.place + self.length < len(content):
                window = content[self.place : self.place + self.length + 1]
                self.place += self.length
                # The position includes this window already: a checkpoint now has it.
                yield window.long()
            self.file, self.place = self.file + 1, 0
        self.file = self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"file": self.file, "place": self.place}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.file, self.place = state_dict["file"], state_dict["place"]


class NextByte(nn.Module):
    """Scores of the byte that follows each position [B, T, 256], from bytes [B, T]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        scores: Tensor = self.out(self.memory(self.embed(text))[0])
        return scores


class Streamed:
    """The class in `training.task.entrypoint`; `training.task.config` has its arguments."""

    def __init__(self, width: int = 64, length: int = 32) -> None:
        self.width, self.length = width, length

    def model(self) -> nn.Module:
        return NextByte(self.width)

    def data(self) -> tuple[Windows, list[Tensor]]:
        """Training samples are the windows of all files except two; held-out samples are the first 200 of those two."""
        files = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if path.stat().st_size > 8192]
        held_out = Windows(files[:2], self.length)
        return Windows(files[2:], self.length), [window for window, _ in zip(held_out, range(200), strict=False)]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        scores, following = model(batch[:, :-1]), batch[:, 1:]
        losses = functional.cross_entropy(scores.transpose(1, 2), following, reduction="none").mean(-1)
        return Loss(losses.sum(), {"right": Mean((scores.argmax(-1) == following).sum(), following.numel())})
