"""Interface of a task for the loop: the same for built-in (supervised.py) and users' tasks (own.py)."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from disttrain_trainer.data.batches import Batching, Datasets, Microbatch
from disttrain_trainer.data.stream import Stream
from disttrain_trainer.protocols import Loss, Mean
from disttrain_trainer.runtime.errors import DataNotFound, InvalidConfiguration

Forward = Callable[..., Any]
"""The model as it is called: the module, what wraps it, or a rank's part of a pipeline."""


PERPLEXITY = "perplexity"
"""The figure that is the exponential of the held-out loss per token."""


class RunnableTask(Batching, Protocol):
    """Model, data, batches, loss and figures of a job."""

    @property
    def has_figures(self) -> bool:
        """Whether `loss` may have figures beside the loss."""

    def model(self) -> nn.Module:
        """Return the model, whole."""

    def data(self) -> Datasets:
        """Return the samples."""

    def place(self, device: torch.device, model: nn.Module) -> None:
        """Move what the task holds besides `model` to the device."""

    def optimizer(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of the trained parameters that this rank holds, by name."""

    def counts_tokens(self, data: Datasets) -> bool:
        """Return whether `weight` counts tokens; otherwise throughput is that of samples."""

    def loss(self, model: Forward, microbatch: Microbatch) -> Loss:
        """Return the summed loss of the samples that are not padding."""

    def evaluate(self, model: Forward, microbatch: Microbatch) -> Mapping[str, Mean]:
        """Return `loss` and other figures of held-out samples; none on ranks that have no outputs (pipelines)."""

    def has_figure(self, name: str, data: Datasets) -> bool | None:
        """Return whether evaluations have a figure of that name; None where only the evaluation knows."""


def as_model(field: str, entrypoint: str, returned: object) -> nn.Module:
    """Return the result of a user's code, which must be a model. Raises InvalidConfiguration."""
    if not isinstance(returned, nn.Module):
        raise InvalidConfiguration(
            f"`{field}.entrypoint`: {entrypoint} returned a {type(returned).__name__}, expected a torch.nn.Module"
        )
    for name, value in (*returned.named_parameters(), *returned.named_buffers()):
        if is_lazy(value):
            layer = type(returned.get_submodule(name.rpartition(".")[0])).__name__
            raise InvalidConfiguration(
                f"`{field}`: `{name}` has no size yet ({layer}): give its layer its sizes, or call the model once with "
                "a batch before it is returned"
            )
    if not any(parameter.requires_grad for parameter in returned.parameters()):
        raise InvalidConfiguration(f"`{field}`: the model has no parameter to train")
    return returned


def as_datasets(field: str, entrypoint: str, returned: object) -> Datasets:
    """Return the result of a user's code, which must be data. Raises InvalidConfiguration, or DataNotFound without
    samples."""
    pair = tuple(returned) if isinstance(returned, tuple | list) else ()
    place = f"`{field}.entrypoint`: {entrypoint}"
    if len(pair) == 2 and _is_iterated(pair[0]) and (pair[1] is None or _is_dataset(pair[1])):
        missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(pair[0], name, None))]
        if missing:
            raise InvalidConfiguration(
                f"{place} returned training samples that are iterated, a {type(pair[0]).__name__} without "
                f"{' and '.join(missing)}: a job that resumes goes on at its position (protocols.IterableDataset)"
            )
        return Datasets(Stream(pair[0], place), pair[1])
    if len(pair) != 2 or not _is_dataset(pair[0]) or not (pair[1] is None or _is_dataset(pair[1])):
        raise InvalidConfiguration(
            f"{place} returned a {type(returned).__name__}, expected (training, held-out) with __len__ and __getitem__ "
            "each, or __iter__ for training; None for the second where nothing is held out"
        )
    if len(pair[0]) == 0:
        raise DataNotFound(f"{place} returned no training samples")
    return Datasets(*pair)


def _is_iterated(value: object) -> bool:
    """Whether samples come one after another. torch's IterableDataset has a __getitem__ that raises, and no length."""
    return hasattr(value, "__iter__") and not _is_dataset(value)


def _is_dataset(value: object) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")
