"""Losses as weighted sums, so that the mean is taken once, over all samples of all ranks and microsteps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from disttrain_api.training import Loss, LossName
from disttrain_trainer.parallel.vocabulary_loss import vocabulary_cross_entropy
from disttrain_trainer.protocols import offered
from disttrain_trainer.runtime.errors import InvalidConfiguration

# torch's own mark for targets that do not count.
IGNORED = -100


@dataclass(frozen=True)
class WeightedLoss:
    """`per_element(outputs, targets)` is the loss of each element with a target of its own: sample or token."""

    per_element: Callable[[Tensor, Tensor], Tensor]

    def sum(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Sum of weight x loss over elements.

        outputs: [B, ..., C]; targets: [B, ...] of classes or [B, ..., C] of numbers; weights: [B], 1 for a sample and 0
        for padding.
        """
        losses = self.per_element(outputs, targets)
        return (losses * over(weights, losses).to(losses.dtype)).sum()


def build_loss(loss: Loss, model: nn.Module, compiled: bool = False) -> WeightedLoss:
    """The loss that the manifest names. `compiled`: cross-entropy as one kernel.

    Computed in FP32 or better, whatever format the outputs have: in BF16 a sum of 500 moves by steps of two. Of a large
    vocabulary the logits are the largest tensor by far, and in FP32 they, their logarithms and gradients are as large
    again; a compiled loss reads and writes logits and gradient once, in their own format.
    Raises InvalidConfiguration where the model is to have a loss and has none.
    """
    if loss.name is LossName.MODEL:
        return WeightedLoss(_loss_of(model))
    if loss.name is LossName.MEAN_SQUARED_ERROR:
        return WeightedLoss(_squared_error)
    smoothing = loss.label_smoothing or 0.0
    whole = torch.compile(_cross_entropy) if compiled else _cross_entropy

    def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
        if isinstance(outputs, DTensor):
            return vocabulary_cross_entropy(exact(outputs), targets, IGNORED, smoothing)
        return whole(outputs, targets, smoothing)

    return WeightedLoss(cross_entropy)


def weight_of(targets: Tensor, weights: Tensor) -> float:
    """Number of elements that count: samples or tokens with weight 1 and a target that is not IGNORED."""
    if targets.is_floating_point():
        return float(weights.sum())
    return float(((targets != IGNORED) * over(weights, targets)).sum())


def _cross_entropy(outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    losses = functional.cross_entropy(
        exact(outputs).flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    )
    return losses.view(targets.shape)


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over the outputs of a sample; classes become one-hot vectors (square loss for classification)."""
    outputs = exact(outputs)
    if targets.is_floating_point():
        return (outputs - targets.view_as(outputs)).square().reshape(len(outputs), -1).mean(1)
    counted = targets != IGNORED
    one_hot = functional.one_hot(targets.where(counted, 0), outputs.shape[-1]).to(outputs.dtype)
    return (outputs - one_hot).square().mean(-1) * counted


def _loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The model's own `loss(outputs, targets)`, whose answer is looked at."""
    name, own = type(model).__name__, offered(model, "loss")
    if own is None:
        raise InvalidConfiguration(
            f"`training.loss.name` Model: the model {name} has no method `loss(outputs, targets)`; give it one, or name"
            " CrossEntropy or MeanSquaredError"
        )

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        found = own(outputs, targets)
        numbers = targets.is_floating_point()
        wanted = targets.shape[:1] if numbers else targets.shape
        if not isinstance(found, Tensor) or found.shape != wanted:
            shape = (
                f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            )
            raise InvalidConfiguration(
                f"`training.loss.name` Model: {name}.loss(outputs, targets) returned {shape}, expected {list(wanted)}:"
                f" a loss for each {'sample' if numbers else 'target'}, neither summed nor averaged"
            )
        return exact(found) if numbers else exact(found).where(targets != IGNORED, 0)

    return losses


def exact(values: Tensor) -> Tensor:
    """The values, at least in FP32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def over(weights: Tensor, elements: Tensor) -> Tensor:
    """The weight of each element: weights [B] to the shape of `elements` [B, ...]."""
    return weights.view(-1, *[1] * (elements.dim() - 1)).to(elements.device).expand(elements.shape)
