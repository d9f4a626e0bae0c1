"""Contrastive learning: each sample has two views of one image, which the model must match among those of other images.

The loss is InfoNCE (van den Oord et al. 2018, "Representation Learning with Contrastive Predictive Coding"). The others
are those of the microbatch, so that microBatchSize is a part of the method.
"""

from collections.abc import Mapping
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from disttrain_trainer.protocols import Loss, Mean


class Views:
    """Two noisy views of an image, each 64 numbers; a function of the index alone."""

    def __init__(self, images: Tensor, noise: float) -> None:
        self.images, self.noise = images, noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        first, second = (self.images[index] + self.noise * torch.randn(64, generator=generator) for _ in range(2))
        return first, second


class Contrastive:
    """The class in `training.task.entrypoint`; `training.task.config` has its arguments."""

    def __init__(self, width: int = 64, noise: float = 0.2, temperature: float = 0.1, rate: float = 0.01) -> None:
        self.width, self.noise, self.temperature, self.rate = width, noise, temperature, rate

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, 32))

    def data(self) -> tuple[Views, Views]:
        images = torch.from_numpy(load_digits().data).float() / 16
        return Views(images[:1500], self.noise), Views(images[1500:], self.noise)

    def optimizer(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW that lets the projection, which is thrown away after training, go twice as fast."""
        projection = [parameter for name, parameter in parameters.items() if name.startswith("2.")]
        features = [parameter for name, parameter in parameters.items() if not name.startswith("2.")]
        groups: list[dict[str, Any]] = [{"params": features}, {"params": projection, "lr": 2 * self.rate}]
        return torch.optim.AdamW(groups, lr=self.rate)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        first, second = functional.normalize(model(torch.cat(batch)), dim=-1).chunk(2)
        scores = first @ second.T / self.temperature
        own = torch.arange(len(scores), device=scores.device)
        loss = functional.cross_entropy(scores, own, reduction="sum")
        return Loss(loss, {"right": Mean((scores.argmax(-1) == own).sum(), len(own))})
