"""The model, data and loss of trainer_overhead.py as a task of one's own: what `training.task` costs beside names."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from disttrain_api.training import Training
from disttrain_trainer.protocols import Loss
from disttrain_trainer.tasks.supervised import build_model, load_data


class Language:
    """What `training.task.entrypoint` names. named: `training` as it would be without a task."""

    def __init__(self, named: dict[str, Any]) -> None:
        self._named = Training.model_validate(named)

    def model(self) -> nn.Module:
        return build_model(self._named)

    def data(self) -> tuple[Any, Any]:
        data = load_data(self._named)
        return data.training, data.held_out

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        """The mean over the tokens of a sample, summed over samples."""
        inputs, targets = batch
        logits = model(inputs)
        return Loss(cross_entropy(logits.flatten(0, 1), targets.flatten()) * len(inputs))
