"""A model whose parameters are nearly all in one table, and its data, as entry points of examples/embedding-rows.yaml.

The data: pieces of the standard library's sources, each as its words and pairs of words, hashed into rows of the table
(the hashing trick of Weinberger et al. 2009). The task: which package a piece comes from. The model: the mean of the
rows of a piece, and a linear layer (fastText, Joulin et al. 2016).
"""

import re
import sysconfig
import zlib
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")
WORDS = 48
"""Words of a piece; it has one pair less."""


def build_model(rows: int, width: int = 16) -> nn.Module:
    """Rows of pieces [B, 2 x WORDS - 1] -> [B, packages]. With sparse=True the table's gradient has few rows."""
    table = nn.EmbeddingBag(rows, width, mode="mean", sparse=True)
    nn.init.normal_(table.weight, std=0.1)
    return nn.Sequential(table, nn.Linear(width, len(PACKAGES)))


def load_data(rows: int) -> tuple[TensorDataset, TensorDataset]:
    """Pieces to train on, and every fifth one held out."""
    library = Path(sysconfig.get_path("stdlib"))
    pieces, classes = [], []
    for number, package in enumerate(PACKAGES):
        for file in sorted((library / package).glob("*.py")):
            words = re.findall(r"\w+", file.read_text(encoding="utf-8"))
            for begin in range(0, len(words) - WORDS + 1, WORDS):
                pieces.append(rows_of(words[begin : begin + WORDS], rows))
                classes.append(number)
    inputs, targets = torch.stack(pieces), torch.tensor(classes)
    held_out = torch.arange(len(inputs)) % 5 == 0
    return TensorDataset(inputs[~held_out], targets[~held_out]), TensorDataset(inputs[held_out], targets[held_out])


def rows_of(words: list[str], rows: int) -> Tensor:
    """[2 x len(words) - 1] rows of the words and of their pairs; the same in every process, as hash() is not."""
    pairs = [f"{first} {second}" for first, second in pairwise(words)]
    return torch.tensor([zlib.crc32(text.encode()) % rows for text in words + pairs])
