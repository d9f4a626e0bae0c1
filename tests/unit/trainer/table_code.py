"""A user's models with tables, as entry points."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

ROWS, BAGS, WIDTH = 1000, 300, 4


class Tabled(nn.Module):
    """Rows [B, 6] -> [B, 5] in float64, by an embedding with padding and a bag."""

    def __init__(self, sparse: bool, max_norm: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, padding_idx=3, sparse=sparse, max_norm=max_norm)
        self.bag = nn.EmbeddingBag(BAGS, WIDTH, mode="sum", sparse=sparse)
        self.out = nn.Linear(WIDTH, 5)
        self.double()

    def forward(self, rows: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(rows).mean(1) + self.bag(input=rows % BAGS)))


class Whole(Tabled):
    """Uses a table also as a whole."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) + self.embed.weight.square().mean()


def tabled(sparse: bool = True, max_norm: float | None = None) -> nn.Module:
    return Tabled(sparse, max_norm)


def whole() -> nn.Module:
    return Whole(sparse=True)


def tied() -> nn.Module:
    model = Tabled(sparse=True)
    model.head = nn.Linear(WIDTH, ROWS, bias=False)
    model.head.weight = model.embed.weight
    return model


class Hidden(Tabled):
    """Has sparse gradients without a module that says so."""

    def forward(self, rows: Tensor) -> Tensor:
        found = nn.functional.embedding(rows, self.embed.weight, sparse=True)
        return self.out(torch.tanh(found.mean(1) + self.bag(input=rows % BAGS)))


def hidden() -> nn.Module:
    return Hidden(sparse=False)


def row_samples(size: int = 50) -> tuple[Dataset, Dataset]:
    """Rows of which some come often and most never; 3 is the padding."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randint(20, (size + 11, 6), generator=generator) ** 2
    inputs[:, 0] = torch.randint(ROWS, (size + 11,), generator=generator)
    inputs[:, 5] = 3
    targets = torch.randint(5, (size + 11,), generator=generator)
    return TensorDataset(inputs[:size], targets[:size]), TensorDataset(inputs[size:], targets[size:])
