"""Models for what happens on GPUs alone, as entry points."""

import torch
from torch import Tensor, nn


class Loud(nn.Module):
    """6 numbers -> 5 logits whose gradients, once scaled for FP16, overflow until the scale has fallen."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.float()) * self.factor


def loud(factor: float = 1000.0) -> nn.Module:
    return Loud(factor)


class Greedy(nn.Linear):
    """6 numbers -> 5 logits, for which it wants more memory than any GPU has."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty(2**48, dtype=torch.uint8, device=x.device)
        return super().forward(x.float()) + kept[0]


def greedy() -> nn.Module:
    return Greedy(6, 5)
