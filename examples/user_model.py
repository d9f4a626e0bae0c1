"""A model and a data set of one's own, as entry points of examples/entrypoint.yaml.

The data: points on two interleaved spirals, one class each. The model: layers of sines, which are good at such curves.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class SineNetwork(nn.Module):
    """[B, 2] -> [B, 2]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, points: Tensor) -> Tensor:
        return self.out(torch.sin(self.second(torch.sin(5 * self.first(points)))))


def build_model(width: int = 64) -> nn.Module:
    """What `training.model.entrypoint` names; `training.model.config` holds its arguments."""
    return SineNetwork(width)


def load_data(size: int, noise: float = 0.02) -> tuple[TensorDataset, TensorDataset]:
    """What `training.data.entrypoint` names: samples to train on, and held-out ones, alike on every rank."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(size) % 2
    turns = torch.rand(size, generator=generator) * 1.5 + 0.25
    angles = 2 * torch.pi * turns + torch.pi * classes
    points = torch.stack([turns * angles.cos(), turns * angles.sin()], dim=1) / 1.75
    points += noise * torch.randn(points.shape, generator=generator)
    held_out = size // 5
    return (
        TensorDataset(points[held_out:], classes[held_out:]),
        TensorDataset(points[:held_out], classes[:held_out]),
    )
