"""Losses as weighted sums, so that the mean is taken once, over all samples of all ranks and microsteps."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
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
    """`per_element(outputs, targets)` is the loss of each element with a target of its own: sample or token.

    The model is called inside of `summing` for what `sum` takes, inside of `judging` for what `each` and `hits` take.
    Here that is the model's outputs; the output layers of a ChunkedLoss return something else.
    """

    per_element: Callable[[Tensor, Tensor], Tensor]

    def take_over(self, *, at_once: bool) -> None:
        """Change the model's layers, which are cut over their tensor group and not yet wrapped, as the loss needs them.
        at_once: whether each forward pass is followed by its backward pass."""

    def summing(self, targets: Tensor, weights: Tensor) -> AbstractContextManager[None]:
        """The model's forward pass for `sum` runs inside."""
        return nullcontext()

    def judging(self, targets: Tensor, by: "WeightedLoss | None" = None) -> AbstractContextManager[None]:
        """The model's forward pass for `each` and `hits` runs inside. by: another loss than this one."""
        return nullcontext()

    def each(self, outputs: Tensor, targets: Tensor, by: "WeightedLoss | None" = None) -> Tensor:
        """Return the loss of each element, by another loss where one was given to `judging`."""
        return (by or self).per_element(outputs, targets)

    def hits(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return for each target whether its class has the highest score; None where outputs are no such scores."""
        return hits_of(outputs, targets) if scores_classes(outputs, targets) else None

    def sum(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Sum of weight x loss over elements.

        outputs: [B, ..., C]; targets: [B, ...] of classes or [B, ..., C] of numbers; weights: [B], 1 for a sample and 0
        for padding. Raises InvalidConfiguration where outputs and targets do not fit.
        """
        return weighted_sum(self.per_element(outputs, targets), weights)


def build_loss(loss: Loss, model: nn.Module, compiled: bool = False) -> WeightedLoss:
    """The loss that the manifest names. `compiled`: cross-entropy as one kernel.

    Computed in FP32 or better, whatever format the outputs have: in BF16 a sum of 500 moves by steps of two.
    With a large vocabulary the logits are the largest tensor by far, and in FP32 they, their logarithms and gradients
    are as large again; a compiled loss reads and writes logits and gradient once, in their own format.
    Raises InvalidConfiguration where the model is to have a loss and has none.
    """
    if loss.name is LossName.MODEL:
        return WeightedLoss(_loss_of(model))
    if loss.name is LossName.MEAN_SQUARED_ERROR:
        return WeightedLoss(_squared_error)
    smoothing = loss.label_smoothing or 0.0
    whole = torch.compile(_cross_entropy) if compiled else _cross_entropy

    def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
        _require_scores(outputs, targets)
        if not isinstance(outputs, DTensor):
            return whole(outputs, targets, smoothing)
        if targets.is_floating_point():
            raise InvalidConfiguration(
                f"`parallelism.vocabularyParallel`: the targets are probabilities ({_kind(targets)}), expected classes,"
                " which are whole numbers: leave it out"
            )
        return vocabulary_cross_entropy(exact(outputs), targets.long(), IGNORED, smoothing)

    return WeightedLoss(cross_entropy)


def weight_of(targets: Tensor, weights: Tensor) -> float:
    """Number of elements that count: samples, or whole numbers of samples with weight 1 that are not IGNORED.

    Both lie in the host's memory, where numpy counts in a third of torch's time: it is done for each microbatch.
    """
    if targets.is_floating_point():
        return float(weights.sum())
    counts, each = targets.numpy() != IGNORED, weights.tolist()
    if each.count(1.0) == len(each):
        return float(np.count_nonzero(counts))
    return float(counts.reshape(len(each), -1).sum(1) @ weights.numpy())


def scores_classes(outputs: Tensor, targets: Tensor) -> bool:
    """Whether outputs are scores of classes, of which the targets are some; else both are numbers."""
    return not targets.is_floating_point() and outputs.shape[:-1] == targets.shape and outputs.shape[-1] > 1


def hits_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Whether the class of each target has the highest score."""
    whole = scores.full_tensor() if isinstance(scores, DTensor) else scores
    return whole.argmax(-1) == targets


def _cross_entropy(outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return the loss of each target class; for probabilities the mean over the positions of a sample."""
    outputs = exact(outputs)
    soft = targets.is_floating_point()
    losses = functional.cross_entropy(
        outputs.flatten(0, -2),
        targets.flatten(0, -2).to(outputs.dtype) if soft else targets.flatten().long(),
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    )
    return losses.view(len(targets), -1).mean(1) if soft else losses.view(targets.shape)


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over the numbers of a sample, or of each whole number; classes become one-hot vectors (square loss for
    classification)."""
    outputs = exact(outputs)
    if targets.is_floating_point():
        _require_numbers(outputs, targets)
        return (outputs - targets.reshape(outputs.shape)).square().reshape(len(outputs), -1).mean(1)
    targets = targets.long()
    counted = targets != IGNORED
    if not scores_classes(outputs, targets):
        _require_numbers(outputs, targets)
        return (outputs.reshape(targets.shape) - targets).square() * counted
    one_hot = functional.one_hot(targets.where(counted, 0), outputs.shape[-1]).to(outputs.dtype)
    return (outputs - one_hot).square().mean(-1) * counted


def _require_scores(outputs: Tensor, targets: Tensor) -> None:
    """Raises InvalidConfiguration where cross-entropy would compare other outputs with other targets, or none."""
    samples = list(outputs.shape[:-1])
    if targets.is_floating_point():
        several = outputs.dim() > 1 and outputs.shape[-1] > 1
        if several and outputs.shape == targets.shape:
            return
        probabilities = f"class, of shape {list(outputs.shape)}" if several else "of several classes"
        expected = (
            f"classes, which are whole numbers, of shape {samples}, or a probability for each {probabilities}; for "
            f"other numbers name {LossName.MEAN_SQUARED_ERROR.value}"
        )
    elif samples == list(targets.shape):
        return
    else:
        second = outputs.dim() > 2 and outputs.shape[:1] + outputs.shape[2:] == targets.shape
        move = " (where they come second, the model ends with `.movedim(1, -1)`)" if second else ""
        expected = f"outputs of shape {_of_classes(targets)}, the scores of the classes last{move}"
    raise _unfit(LossName.CROSS_ENTROPY, outputs, targets, expected)


def _require_numbers(outputs: Tensor, targets: Tensor) -> None:
    """Raises InvalidConfiguration where outputs and targets are not the same numbers of the same samples.

    They may differ in dimensions of size 1, and one of them may be flat.
    """
    forms = [[size for size in values.shape[1:] if size != 1] for values in (outputs, targets)]
    flat = outputs[:1].numel() == targets[:1].numel() and min(len(form) for form in forms) <= 1
    if len(outputs) != len(targets) or not (flat or forms[0] == forms[1]):
        classes = f", or of classes outputs of shape {_of_classes(targets)}"
        expected = "as many numbers for each sample, in the same order"
        raise _unfit(
            LossName.MEAN_SQUARED_ERROR,
            outputs,
            targets,
            expected if targets.is_floating_point() else expected + classes,
        )


def _unfit(name: LossName, outputs: Tensor, targets: Tensor, expected: str) -> InvalidConfiguration:
    return InvalidConfiguration(
        f"`training.loss.name` {name.value}: the model's outputs have the shape {list(outputs.shape)}, its targets "
        f"{list(targets.shape)} and the type {_kind(targets)}; expected {expected}"
    )


def _of_classes(targets: Tensor) -> str:
    return f"[{', '.join(map(str, targets.shape))}, classes]"


def _kind(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


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


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of weight x loss. losses: [B, ...]; weights: [B]."""
    return (losses * over(weights, losses).to(losses.dtype)).sum()


def over(weights: Tensor, elements: Tensor) -> Tensor:
    """The weight of each element: weights [B] to the shape of `elements` [B, ...]."""
    return weights.view(-1, *[1] * (elements.dim() - 1)).to(elements.device).expand(elements.shape)
