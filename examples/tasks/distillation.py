"""Distillation: a small student learns the answers of a teacher (Hinton et al. 2015, "Distilling the Knowledge in a
Neural Network"). The teacher is an attribute of the task: it lies on the device, and is neither trained nor saved.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from disttrain_trainer.protocols import Loss, Mean


class Distillation:
    """The class in `training.task.entrypoint`; `training.task.config` has its arguments."""

    def __init__(self, width: int = 32, temperature: float = 2.0) -> None:
        self.width, self.temperature = width, temperature
        digits = load_digits()
        self.images, self.classes = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
        known = LogisticRegression(max_iter=200).fit(self.images[:1500], self.classes[:1500])
        self.teacher = nn.Linear(64, 10)
        self.teacher.load_state_dict({"weight": torch.tensor(known.coef_), "bias": torch.tensor(known.intercept_)})

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, 10))

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        """The student does not see the classes; they are used to evaluate it."""
        return (
            TensorDataset(self.images[:1500], self.classes[:1500]),
            TensorDataset(self.images[1500:], self.classes[1500:]),
        )

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(self._divergence(model(batch[0]), batch[0]))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Mean]:
        images, classes = batch
        answers = model(images)
        chosen, taught = answers.argmax(-1), self.teacher(images).argmax(-1)
        return {
            "loss": Mean(self._divergence(answers, images), len(images)),
            "accuracy": Mean((chosen == classes).sum(), len(images)),
            "agreement": Mean((chosen == taught).sum(), len(images)),
        }

    def _divergence(self, answers: Tensor, images: Tensor) -> Any:
        soft = functional.softmax(self.teacher(images) / self.temperature, dim=-1)
        return functional.kl_div(functional.log_softmax(answers / self.temperature, dim=-1), soft, reduction="sum")
