"""The built-in task: (input, target) samples, a model that takes the input, a loss of outputs and targets."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from disttrain_api import choices, samples
from disttrain_api.builtin import OfTokens, data_config, model_config
from disttrain_api.choices import choices_config
from disttrain_api.samples import samples_config
from disttrain_api.training import Loss as LossSettings
from disttrain_api.training import LossName, Training
from disttrain_trainer.chunked_loss import in_chunks
from disttrain_trainer.data.batches import Datasets, Microbatch, loss_of
from disttrain_trainer.data.choices import FIGURES, load_choices
from disttrain_trainer.data.collate import collate, filled_up, parts_of
from disttrain_trainer.data.packed import Packed
from disttrain_trainer.data.prompts import load_prompts
from disttrain_trainer.data.rows import Predicting, Rows
from disttrain_trainer.losses import IGNORED, WeightedLoss, build_loss, over, weight_of, weighted_sum
from disttrain_trainer.optim.optimizers import build_optimizer
from disttrain_trainer.parallel.context.documents import Documents
from disttrain_trainer.parallel.context.part import Context
from disttrain_trainer.protocols import Loss, Mean
from disttrain_trainer.runtime.entrypoint import call_entrypoint
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.tasks.base import PERPLEXITY, Forward, as_datasets, as_model

_PARTS = (Tensor, np.ndarray, np.number, int, float)
"""What the input and the target of a sample may be."""


class Supervised:
    """`training.model`, `training.data` and `training.loss`."""

    has_figures = False
    pads = True
    """Pipelines pass tensors of one size on, and compiled models are compiled once."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._weighted: WeightedLoss | None = None
        self._loss_of = self._sum
        self._context: Context | None = None
        self._longest: int | None = None
        self._always_longest = False
        self._documents: Documents | None = None

    def model(self) -> nn.Module:
        return build_model(self._training)

    def data(self) -> Datasets:
        data = load_data(self._training)
        self._longest = data.longest
        if (asked := choices_config(self._training)) is not None:
            data = replace(data, choices=load_choices(asked, self.longest_input(choices.FIELD, data)))
        if (written := samples_config(self._training)) is not None:
            data = replace(data, prompts=load_prompts(written, self.longest_input(samples.FIELD, data)))
        return data

    def longest_input(self, field: str, data: Datasets) -> int:
        """Return the tokens that the model takes, as far as that is known. Raises InvalidConfiguration where the
        evaluation that `field` asks for needs other data."""
        if not self.counts_tokens(data):
            raise InvalidConfiguration(f"`{field}` needs samples of `training.data` with a class for each token")
        config = None if self._training.model.name is None else model_config(self._training)
        if isinstance(config, OfTokens) and config.sequence_length is not None:
            return config.sequence_length
        return data.longest or len(data.first_sample[0])

    def place(self, device: torch.device, model: nn.Module) -> None:
        """Nothing: the model is all there is."""

    def use_loss_of(self, module: nn.Module) -> WeightedLoss:
        """The loss, which may be a method of the model. Raises InvalidConfiguration where it has none."""
        settings = self._training.loss
        whole = build_loss(settings, module, self._training.compile)
        self._weighted = whole if settings.chunks is None else in_chunks(whole, module, settings.chunks)
        return self._weighted

    def compile_with_model(self) -> None:
        """Compile the model's pass and its loss as one, for a model that is called as it was made."""
        self._loss_of = torch.compile(self._sum)

    def fill_up(self) -> None:
        """Make all batches of sequences of unlike lengths as long as one may be."""
        self._always_longest = True

    def use_context(self, context: Context) -> None:
        """Make batches of the part of every sequence that is this rank's."""
        self._context = context

    def use_documents(self, documents: Documents) -> None:
        """Say of every microbatch that is computed where its documents begin."""
        self._documents = documents

    def collate(self, samples: Sequence[Any], indices: Sequence[int]) -> tuple[Tensor, ...]:
        if isinstance(samples, Rows):
            return samples.batch if self._context is None else self._context.part_of(*samples.batch)
        for index, sample in zip(indices, samples, strict=True):
            require_pair(sample, f"sample {index}")
        if self._longest is not None:
            samples = filled_up(samples, self._longest if self._always_longest else None)
        batch = collate("training.data", samples, indices)
        pair: tuple[Tensor, Tensor] = (batch[0], batch[1])
        if self._context is not None:
            pair = self._context.part_of(*pair)
        return Packed(*pair, batch.starts) if isinstance(batch, Packed) else pair

    def weight(self, batch: tuple[Tensor, ...], weights: Tensor) -> float:
        if isinstance(batch, Predicting):
            # To look at each target takes a seventh of the time of a small microbatch.
            return float(sum(weights.tolist()) * batch.targets.shape[1])
        return weight_of(batch[1], weights)

    def optimizer(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(self._training.optimizer, parameters)

    def counts_tokens(self, data: Datasets) -> bool:
        """A class for each position of a sequence; anything else is counted in samples."""
        sample = data.first_sample
        require_pair(sample, "sample 0")
        target = sample[1]
        return isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point()

    def loss(self, model: Forward, microbatch: Microbatch) -> Loss:
        assert self._weighted is not None
        self._begin(microbatch)
        with self._weighted.summing(microbatch.targets, microbatch.weights):
            return Loss(self._loss_of(model, microbatch.inputs, microbatch.targets, microbatch.weights))

    def _sum(self, model: Forward, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the losses of a microbatch."""
        assert self._weighted is not None
        outputs = model(inputs)
        self._require_tensor(outputs)
        return self._weighted.sum(outputs, targets, weights)

    def evaluate(self, model: Forward, microbatch: Microbatch) -> Mapping[str, Mean]:
        """`loss`, and `accuracy` where outputs are scores of classes."""
        assert self._weighted is not None
        self._begin(microbatch)
        targets = microbatch.targets
        with self._weighted.judging(targets):
            outputs = model(microbatch.inputs)
        if outputs is None:
            return {}
        self._require_tensor(outputs)
        losses = self._weighted.each(outputs, targets)
        figures = {"loss": Mean(weighted_sum(losses, microbatch.weights), microbatch.weight)}
        hits = None if self._training.loss.name is LossName.MODEL else self._weighted.hits(outputs, targets)
        if hits is not None:
            counted = (targets != IGNORED) & (over(microbatch.weights, targets) > 0)
            figures["accuracy"] = Mean((hits * counted).sum(), counted.sum())
        return figures

    def token_losses(self, model: Forward, microbatch: Microbatch) -> Tensor | None:
        """Return the cross-entropy of each target that this rank has [B, T], whatever the loss that is trained; None on
        ranks without outputs."""
        assert self._weighted is not None
        self._begin(microbatch)
        plain = build_loss(LossSettings(), nn.Identity())
        with self._weighted.judging(microbatch.targets, plain):
            outputs = model(microbatch.inputs)
        if outputs is None:
            return None
        self._require_tensor(outputs)
        return self._weighted.each(outputs, microbatch.targets, plain)

    def marked_outputs(self, model: Forward, microbatch: Microbatch) -> tuple[NDArray[np.int64], Tensor] | None:
        """Return the model's outputs [n, V] at the positions that this rank has of those that have a target, and the
        sample of each [n]; None on ranks without outputs."""
        self._begin(microbatch)
        outputs = model(microbatch.inputs)
        if outputs is None:
            return None
        self._require_tensor(outputs)
        places = (microbatch.targets != IGNORED).nonzero(as_tuple=True)
        if isinstance(outputs, DTensor):
            # Whole are the rows that are wanted alone.
            own = DTensor.from_local(outputs.to_local()[places], outputs.device_mesh, [Shard(1)])
            return places[0].numpy(force=True), own.full_tensor()
        return places[0].numpy(force=True), outputs[places]

    def batch_of_lengths(self, samples: Sequence[tuple[Tensor, Tensor]], multiple: int) -> tuple[Tensor, Tensor]:
        """Return sequences of unlike lengths, and their targets, as this rank computes them: filled up to a multiple
        of `multiple`, and cut where it has a part of each."""
        longest = max(len(inputs) for inputs, _ in samples)
        filled = filled_up(samples, -(-longest // multiple) * multiple)
        inputs, targets = (torch.stack(part) for part in zip(*filled, strict=True))
        return (inputs, targets) if self._context is None else self._context.part_of(inputs, targets)

    def _begin(self, microbatch: Microbatch) -> None:
        if self._documents is not None:
            self._documents.use(microbatch.starts, microbatch.host_starts)

    def has_figure(self, name: str, data: Datasets) -> bool | None:
        if name in (f"{task.name}/{figure}" for task in data.choices for figure in FIGURES):
            return True
        if any(name == loss_of(part) for part, _ in data.parts):
            return True
        loss = self._training.loss
        if name == PERPLEXITY:
            # With smoothed targets the loss is no logarithm of a probability.
            plain = loss.name is LossName.CROSS_ENTROPY and not loss.label_smoothing
            return data.held_out is not None and plain and self.counts_tokens(data)
        if name != "accuracy" or data.held_out is None:
            return name in ("loss", "accuracy")
        sample = data.held_out[0]
        require_pair(sample, "held-out sample 0")
        # What a model with a loss of its own returns is its own affair.
        if loss.name is LossName.MODEL or torch.as_tensor(sample[1]).is_floating_point():
            return False
        return True if loss.name is LossName.CROSS_ENTROPY else None

    def _require_tensor(self, outputs: object) -> None:
        """Raise InvalidConfiguration for outputs that no built-in loss accepts; a model's own loss accepts any."""
        if self._training.loss.name is LossName.MODEL:
            return
        if not isinstance(outputs, Tensor):
            raise InvalidConfiguration(
                f"`training.model`: the model returned a {type(outputs).__name__}, expected one tensor, such as scores "
                "[B, ..., C]; return that, or use `loss.name` Model or a `training.task`"
            )
        if torch.is_grad_enabled() and not outputs.requires_grad:
            raise InvalidConfiguration(
                "`training.model`: the model returned a tensor without a gradient: it must come from parameters that "
                "are trained, not detached and not under torch.no_grad"
            )


def require_pair(sample: Any, name: str) -> None:
    """Raises InvalidConfiguration for a sample that is no pair of an input and a target, one tensor or number each."""
    if isinstance(sample, Packed):
        return
    advice = "expected (input, target); for other samples give a `training.task`"
    if not (isinstance(sample, Sequence) and not isinstance(sample, str | bytes) and len(sample) == 2):
        kind = type(sample).__name__
        size = f" of {len(sample)}" if isinstance(sample, list | tuple | dict) else ""
        raise InvalidConfiguration(f"`training.data`: {name} is a {kind}{size}, {advice}")
    for part, value in zip(("input", "target"), sample, strict=True):
        if not isinstance(value, _PARTS):
            inner = [(path.removeprefix("part "), kind.text) for path, kind in parts_of(value)]
            shown = ", ".join(f"{path} {text}" for path, text in inner[:4] if path != "all")
            found = f"a {type(value).__name__}" + (f" ({shown})" if shown else "")
            raise InvalidConfiguration(f"`training.data`: the {part} of {name} is {found}, {advice}")


def build_model(training: Training) -> nn.Module:
    """The built-in model, or the one that the entry point returns."""
    if training.model.name is not None:
        module: nn.Module = import_module(f"disttrain_trainer.models.{training.model.name}.model").build(
            model_config(training)
        )
        return module
    assert training.model.entrypoint is not None
    returned = call_entrypoint("training.model", training.model.entrypoint, training.model.config)
    return as_model("training.model", training.model.entrypoint, returned)


def load_data(training: Training) -> Datasets:
    """The built-in data, or what the entry point returns."""
    if training.data.name is not None:
        data: Datasets = import_module(f"disttrain_trainer.data.{training.data.name}").load(data_config(training.data))
        return replace(data, draws=False, settings={"name": training.data.name, **data.settings})
    assert training.data.entrypoint is not None
    returned = call_entrypoint("training.data", training.data.entrypoint, training.data.config)
    return as_datasets("training.data", training.data.entrypoint, returned)
