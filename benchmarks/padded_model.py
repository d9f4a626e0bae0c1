"""A model whose layers take a known time: they wait. So a few cores can stand for many devices."""

import time

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.data import TensorDataset

WIDTH = 8


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Padded(nn.Module):
    """[B, WIDTH] -> [B, WIDTH], in the given times."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = (forward_seconds, backward_seconds)

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(self.linear(x), *self.seconds)


def padded(layers: int, forward_seconds: float, backward_seconds: float) -> nn.Module:
    """`layers` layers that take the same time each."""
    return nn.Sequential(*(Padded(forward_seconds, backward_seconds) for _ in range(layers)))


def numbers(size: int = 256) -> tuple[TensorDataset, None]:
    """Random inputs and classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.randint(WIDTH, (size,), generator=generator)), None
