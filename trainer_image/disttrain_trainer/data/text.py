"""Bytes of text files as sequences that predict their next byte."""

import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from disttrain_api.builtin import TextConfig
from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.data.rows import Rows, predicting_the_next
from disttrain_trainer.runtime.errors import DataNotFound


class ByteSequences(Dataset[tuple[Tensor, Tensor]]):
    """Sample i: bytes i T .. i T + T - 1 as input, the same shifted by one as target; both [T], int64."""

    def __init__(self, text: NDArray[np.uint8], length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.length)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        """Return these samples, cut together."""
        starts = (index * self.length for index in indices)
        windows = np.stack([self.text[start : start + self.length + 1] for start in starts])
        return predicting_the_next(windows)


def load(config: TextConfig) -> Datasets:
    """Training and held-out sequences. Raises DataNotFound naming the path."""
    files = _files(config)
    training, held_out = _split([np.frombuffer(file.read_bytes(), np.uint8) for file in files], config)
    for name, text in (("training", training), ("held-out", held_out)):
        if len(text) <= config.sequence_length:
            raise DataNotFound(
                f"`training.data.config.paths`: {len(files)} files leave {len(text)} bytes of {name} text, "
                f"expected more than sequenceLength, which is {config.sequence_length}"
            )
    return Datasets(
        ByteSequences(training, config.sequence_length),
        ByteSequences(held_out, config.sequence_length),
        settings={
            "heldOutFraction": config.held_out_fraction,
            "splitSeed": config.split_seed,
            "sequenceLength": config.sequence_length,
        },
    )


def _files(config: TextConfig) -> list[Path]:
    """All files, in an order that does not depend on the file system."""
    if not config.paths:
        # The standard library's own sources lie wherever Python runs.
        return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files: list[Path] = []
    for path in map(Path, config.paths):
        if not path.exists():
            raise DataNotFound(f"`training.data.config.paths`: {path} does not exist (from {Path.cwd()})")
        found = [path] if path.is_file() else sorted(file for file in path.rglob(config.pattern) if file.is_file())
        if not found:
            raise DataNotFound(f"`training.data.config.paths`: {path} holds no file that matches '{config.pattern}'")
        files += found
    return files


def _split(texts: list[NDArray[np.uint8]], config: TextConfig) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Whole files are held out until the fraction is reached; of a single file, its end."""
    wanted = int(sum(map(len, texts)) * config.held_out_fraction)
    if len(texts) == 1:
        at = len(texts[0]) - wanted
        return texts[0][:at], texts[0][at:]
    order = list(range(len(texts)))
    random.Random(config.split_seed).shuffle(order)
    held_out: set[int] = set()
    size = 0
    # One file at least stays for training.
    for index in order[:-1]:
        if size >= wanted:
            break
        held_out.add(index)
        size += len(texts[index])
    training = np.concatenate([text for index, text in enumerate(texts) if index not in held_out])
    return training, np.concatenate([texts[index] for index in sorted(held_out)] or [training[:0]])
