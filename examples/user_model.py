"""Your own model and data set, as entry points of examples/entrypoint.yaml.

The data: points on two interleaved spirals, one class each. The model: layers of sines, which are good at such curves,
with a loss of its own for examples/own-loss.yaml.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class SineNetwork(nn.Module):
    """[B, 2] -> [B, 2]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.sin(self.second(torch.sin(5 * self.first(points)))))
        return scores

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What `loss.name: Model` names, for each point: the focal loss (Lin et al. 2017), little for what is known."""
        missed = functional.cross_entropy(outputs, targets, reduction="none")
        return (1 - (-missed).exp()) * missed

    def flops_per_sample(self) -> float:
        """What `tflops` counts: a product and a sum for each weight, once forward and twice backward."""
        return 6.0 * sum(layer.weight.numel() for layer in (self.first, self.second, self.out))


def build_model(width: int = 64) -> nn.Module:
    """The function in `training.model.entrypoint`; `training.model.config` has its arguments."""
    return SineNetwork(width)


def load_data(size: int, noise: float = 0.02) -> tuple[TensorDataset, TensorDataset]:
    """The function in `training.data.entrypoint`: returns training and held-out samples, the same on every rank."""
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
