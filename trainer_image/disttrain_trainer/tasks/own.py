"""A task of the user's: what `training.task` leads to, whose answers are looked at.

Its batches hold no padding, so that a loss may look at a batch as a whole (contrastive learning): a batch at the end of
an epoch is short. A rank that has no sample of it left computes one whose loss counts nothing.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_api.training import Optimizer, OwnTask
from disttrain_api.transformers_config import TransformersConfig
from disttrain_trainer.data.batches import Datasets, Microbatch
from disttrain_trainer.data.collate import collate
from disttrain_trainer.losses import exact
from disttrain_trainer.optim.optimizers import build_optimizer
from disttrain_trainer.optim.own import as_optimizer
from disttrain_trainer.protocols import Loss, Mean, offered
from disttrain_trainer.runtime.entrypoint import call_entrypoint
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.tasks.base import Forward, as_datasets, as_model

_FIELD = "training.task"
_NEEDED = {"model": "model()", "data": "data()", "loss": "loss(model, batch)"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,62}")
_MAX_FIGURES = 32


class OwnedTask:
    """The task that the entry point returns (protocols.Task)."""

    has_figures = True
    pads = False

    def __init__(self, settings: OwnTask, optimizer: Optimizer, initial_from: str | None = None) -> None:
        """Raises InvalidConfiguration where what the entry point returns is no task, or one that does not begin with
        weights from elsewhere (initial_from)."""
        self._settings = optimizer
        self._name = settings.entrypoint
        self._task = call_entrypoint(_FIELD, settings.entrypoint, settings.config)
        missing = [sentence for name, sentence in _NEEDED.items() if offered(self._task, name) is None]
        if missing:
            raise InvalidConfiguration(
                f"`{_FIELD}.entrypoint`: {self._name} returned a {type(self._task).__name__} without "
                f"{' and '.join(missing)}: a task offers these (disttrain_trainer.protocols.Task)"
            )

        own = offered(self._task, "own_weights")
        if initial_from is not None and own is not None:
            raise InvalidConfiguration(
                f"`training.checkpoint.initialFrom`: the task {self._name} has made more than its model of the weights "
                f"with which that begins, and would not know of others: remove the field, and name them by {own()}"
            )

    def model(self) -> nn.Module:
        return as_model(_FIELD, f"{self._name}.model()", self._task.model())

    def data(self) -> Datasets:
        return as_datasets(_FIELD, f"{self._name}.data()", self._task.data())

    def transformers_config(self) -> TransformersConfig | None:
        """Return what the model of transformers was built of, if the task says so. Raises InvalidConfiguration."""
        if (own := offered(self._task, "transformers_config")) is None:
            return None
        found = own()
        if not isinstance(found, TransformersConfig):
            expected = "a disttrain_api.transformers_config.TransformersConfig"
            raise self._refused("transformers_config()", f"{found!r:.80}", expected)
        return found

    def place(self, device: torch.device, model: nn.Module) -> None:
        trained = {id(parameter) for parameter in model.parameters()}
        for value in vars(self._task).values() if hasattr(self._task, "__dict__") else ():
            if isinstance(value, nn.Module) and not any(id(one) in trained for one in value.parameters()):
                value.to(device).eval().requires_grad_(False)

    def collate(self, samples: Sequence[Any], indices: Sequence[int]) -> Any:
        own = offered(self._task, "collate")
        return collate(_FIELD, samples, indices) if own is None else own(list(samples))

    def weight(self, batch: Any, weights: Tensor) -> float:
        """The task's own count, else that of the samples. Raises InvalidConfiguration for what is no such number."""
        samples, own = float(weights.sum()), offered(self._task, "weight")
        if own is None or samples == 0:
            return samples
        found = own(batch)
        number = _number(found)
        if number is None or not 0 <= number < float("inf"):
            raise self._refused("weight(batch)", f"{found!r:.80}", "a number from 0 on")
        return number

    def optimizer(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The task's own at its groups' rates, else the manifest's. Raises InvalidConfiguration where it is none."""
        own = offered(self._task, "optimizer")
        if own is None:
            return build_optimizer(self._settings, parameters)
        if self._settings != Optimizer():
            raise InvalidConfiguration(
                f"`training.optimizer`: {type(self._task).__name__} has a method `optimizer`: remove one of the two"
            )
        where = f"`{_FIELD}`: {type(self._task).__name__}.optimizer(parameters)"
        return as_optimizer(where, own(dict(parameters)), parameters, self._settings.learning_rate)

    def counts_tokens(self, data: Datasets) -> bool:
        return False

    def loss(self, model: Forward, microbatch: Microbatch) -> Loss:
        found = self._required_loss(self._task.loss(model, microbatch.batch))
        total = exact(found.sum.reshape(()))
        if microbatch.samples == 0:
            # All ranks compute together; what this one computes is padding.
            return Loss(total * 0)
        return Loss(total, self._figures("loss", found.figures))

    def evaluate(self, model: Forward, microbatch: Microbatch) -> Mapping[str, Mean]:
        own = offered(self._task, "evaluate")
        if own is None:
            loss = self.loss(model, microbatch)
            figures = {"loss": Mean(loss.sum, microbatch.weight), **loss.figures}
        else:
            figures = self._figures("evaluate", own(model, microbatch.batch))
        return figures if microbatch.samples else {}

    def has_figure(self, name: str, data: Datasets) -> bool | None:
        return None

    def _required_loss(self, found: object) -> Loss:
        call = "loss(model, batch)"
        if not isinstance(found, Loss):
            raise self._refused(call, _kind(found), "disttrain_trainer.protocols.Loss(sum, figures)")
        if not isinstance(found.sum, Tensor) or found.sum.numel() != 1:
            raise self._refused(call, f"a Loss whose sum is {_kind(found.sum)}", "one number in a tensor")
        if torch.is_grad_enabled() and not found.sum.requires_grad:
            raise self._refused(call, "a Loss whose sum has no gradient", "one that the model has computed")
        return found

    def _figures(self, method: str, found: object) -> dict[str, Mean]:
        if not isinstance(found, Mapping) or len(found) > _MAX_FIGURES:
            raise self._refused(method, _kind(found), f"at most {_MAX_FIGURES} figures by name")
        for name, mean in found.items():
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise self._refused(method, f"a figure named {name!r:.80}", "letters, digits, `_`, `.`, `/` and `-`")
            pair = isinstance(mean, tuple) and len(mean) == 2
            if not (pair and all(_is_scalar(value) for value in mean)):
                raise self._refused(method, f"{_kind(mean)} as `{name}`", "protocols.Mean(sum, weight), a number each")
        return {name: Mean(*mean) for name, mean in found.items()}

    def _refused(self, call: str, found: str, expected: str) -> InvalidConfiguration:
        return InvalidConfiguration(
            f"`{_FIELD}`: {type(self._task).__name__}.{call} returned {found}, expected {expected}"
        )


def _is_scalar(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _number(value: object) -> float | None:
    return float(value) if _is_scalar(value) else None  # type: ignore[arg-type]


def _kind(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
