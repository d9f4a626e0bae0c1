"""A user's models with what FSDP2 does not take as it is, and with what no shards can take."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from disttrain_trainer.checks import layer_watch


def of_shards(function: str, **config: Any) -> dict[str, Any]:
    """Model from this file."""
    return {"entrypoint": f"tests.unit.trainer.shard_code:{function}", "config": config}


class Odd(nn.Module):
    """6 numbers -> 6 numbers: a gate of one number, one that nobody uses, nothing at all, and a transposed matrix."""

    def __init__(self, unused: bool = True) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.tensor(0.3)) if unused else None
        self.nothing = nn.Parameter(torch.empty(0, 6))
        self.matrix = nn.Parameter(torch.randn(6, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(x @ self.matrix) + self.nothing.sum()


class Held(nn.Module):
    """Layers in containers inside each other, and a number of the model's own."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        first = nn.ModuleDict({"odd": Odd(unused), "plain": nn.Linear(6, 6)})
        self.blocks = nn.ModuleList([first, nn.ModuleList([Odd(unused)])])
        self.out = nn.Linear(6, 5)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        x = second[0](first["plain"](first["odd"](x)))
        return self.out(x) * self.temperature.exp()


def held(unused: bool = True) -> nn.Module:
    return Held(unused).double()


def odd_layers() -> nn.Module:
    return nn.Sequential(Odd(), nn.Linear(6, 6), Odd(), nn.Linear(6, 5)).double()


class Mixed(nn.Linear):
    """5 scores, with a parameter of another format."""

    def __init__(self, kind: str, trained: bool) -> None:
        super().__init__(6, 5)
        self.double()
        self.other = nn.Parameter(torch.ones(5, dtype=getattr(torch, kind)), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        other = torch.view_as_real(self.other).sum(-1) if self.other.is_complex() else self.other
        return super().forward(x) * other.to(x.dtype)


def mixed(kind: str, trained: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6).double(), Mixed(kind, trained))


class Turned(nn.Module):
    """6 numbers -> 6 numbers, all of whose parameters are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.view(-1, 3, 2)) * self.by).flatten(1)


def turned() -> nn.Module:
    return nn.Sequential(Turned(), nn.Linear(6, 5))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def mix(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class Around(nn.Module):
    """Uses its second block without calling it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks, self.out, self.how = nn.ModuleList([Block(), Block()]), nn.Linear(6, 5), how

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        x = first(x)
        x = second.mix(x) if self.how == "method" else torch.tanh(x @ second.inner.weight.t())
        return self.out(x)


def around(how: str) -> nn.Module:
    return Around(how).double()


class Masked(nn.Module):
    """A matrix beside a mask that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("mask", torch.ones(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight * self.mask)


def masked() -> nn.Module:
    return nn.Sequential(Block(), nn.Sequential(Masked()), nn.Linear(6, 5))


class Choosing(nn.Module):
    """Calls layers of its own choice: on rank 1 from its fourth pass on others than elsewhere."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 5)
        self.how, self.passes = how, 0
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        other = os.environ["RANK"] == "1" and self.passes > 3
        if self.how == "another":
            chosen = [2] if other else [1]
        elif self.how == "more":
            chosen = [0, 1, 2] if other else [0]
        else:
            chosen = [0]
        for number in chosen:
            x = self.layers[number](x)
        return self.out(x) + (0 if self.how == "no gradient" and other else self.bias)


def choosing(how: str) -> nn.Module:
    if how == "more":
        layer_watch.PATIENCE_SECONDS = 0.2
    return Choosing(how).double()


class LeavingOut(nn.Module):
    """Uses its second layer, or does not from its seventh pass on: on the rank `rank`, on all where that is None."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.leaves, self.passes = rank is None or os.environ["RANK"] == str(rank), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        x = self.first(x)
        return self.out(x if self.leaves and self.passes > 6 else self.second(x))


class Freezing:
    """A callback that trains no second layer."""

    def on_start(self, moment: Any) -> None:
        moment.model.second.requires_grad_(False)


def leaving_out(rank: int | None = None) -> nn.Module:
    return LeavingOut(rank).double()


class Reentrant(nn.Module):
    """Computes a part of it anew in the backward pass, in torch's old way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.out = nn.Linear(6, 6), Block(), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.block, self.first(x), use_reentrant=True))


def reentrant() -> nn.Module:
    return Reentrant().double()
