"""The last layers of a model and its loss, computed together for one chunk of the tokens after the other.

With a large vocabulary the logits of a microbatch, their logarithms and their gradients are the largest tensors of a
step by far. Here those of one chunk are alive at a time: while a microbatch is given, the layers return its loss in
place of logits. Otherwise they return logits, as ever.
Shapes: N tokens (samples without a sequence), D width, V vocabulary.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from disttrain_trainer.losses import WeightedLoss, hits_of, over
from disttrain_trainer.protocols import offered
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.local import local_part

_FIELD = "`training.loss.chunks`"


class OutputLayers:
    """The layers from the last hidden states to the logits, and what they are to return."""

    def __init__(self, layers: Sequence[nn.Module], chunks: int) -> None:
        """layers: in turn [..., D] -> [..., V], each token by itself; to be changed by `take_over`."""
        self._layers, self._chunks = list(layers), chunks
        self._given: _Given | None = None
        self.at_once = True
        """Whether the forward pass computes the gradients, too: the backward pass follows at once."""

    def take_over(self, *, at_once: bool) -> None:
        """Have the layers compute in chunks, in place, once they are cut over a tensor group: what then follows the
        logits is done for those of each chunk, and what precedes the first layer for all tokens together."""
        self.at_once = at_once
        # They share their parameters with the layers, also those that wrapping puts in place later.
        parts = [copy(layer) for layer in self._layers]
        for number, (layer, part) in enumerate(zip(self._layers, parts, strict=True)):
            layer._forward_hooks = OrderedDict()
            if number == 0:
                part._forward_pre_hooks = OrderedDict()
                layer.forward = torch.compiler.disable(self._first)  # type: ignore[method-assign]
            else:
                layer._forward_pre_hooks = OrderedDict()
                layer.forward = self._following(part)  # type: ignore[method-assign]
        self._layers = parts

    @contextmanager
    def given(self, given: "_Given") -> Iterator[None]:
        """Inside, the layers return what is asked for of a microbatch."""
        self._given = given
        try:
            yield
        finally:
            self._given = None

    def trained(self) -> list[nn.Parameter]:
        return [one for layer in self._layers for one in layer.parameters() if one.requires_grad]

    def logits(self, hidden: Tensor) -> Tensor:
        for layer in self._layers:
            hidden = layer(hidden)
        return hidden

    def chunks(self, hidden: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield parts of the hidden states [N, D] and of others [N]."""
        size = -(-max(len(hidden), 1) // self._chunks)
        yield from zip(*(one.split(size) for one in (hidden, *others)), strict=True)

    def _first(self, hidden: Tensor) -> Tensor:
        if self._given is None:
            return self._layers[0](hidden)  # type: ignore[no-any-return]
        return self._given.of(self, hidden)

    def _following(self, part: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: part(x) if self._given is None else x


@dataclass(frozen=True)
class _Given:
    """Targets of a microbatch [B, ...], and the loss of logits and targets."""

    targets: Tensor
    loss: WeightedLoss

    def of(self, layers: OutputLayers, hidden: Tensor) -> Tensor:
        """Return what the layers are to return."""
        raise NotImplementedError

    def _require_classes(self, hidden: Tensor) -> None:
        if self.targets.is_floating_point() or hidden.shape[:-1] != self.targets.shape:
            raise InvalidConfiguration(
                f"{_FIELD}: the last layer takes {list(hidden.shape)}, the targets have the shape "
                f"{list(self.targets.shape)} and the type {str(self.targets.dtype).removeprefix('torch.')}; expected "
                f"a class, which is a whole number, for each of {list(hidden.shape[:-1])}: change them, or remove "
                "`chunks`"
            )


@dataclass(frozen=True)
class _Sum(_Given):
    """Weighted sum of all losses. weights: [B]."""

    weights: Tensor

    def of(self, layers: OutputLayers, hidden: Tensor) -> Tensor:
        self._require_classes(hidden)
        targets = self.targets.to(hidden.device)
        weights = over(self.weights, targets).flatten()
        parameters = layers.trained()
        total: Tensor = _SumOfChunks.apply(
            layers, self.loss, hidden.flatten(0, -2), targets.flatten(), weights, *parameters
        )
        return total


@dataclass(frozen=True)
class _Each(_Given):
    """Loss of each target, and whether its class has the highest score: [B, ..., 2]."""

    def of(self, layers: OutputLayers, hidden: Tensor) -> Tensor:
        self._require_classes(hidden)
        targets = self.targets.to(hidden.device)
        found: list[Tensor] = []
        with torch.no_grad():
            for part, classes in layers.chunks(hidden.flatten(0, -2), targets.flatten()):
                logits = layers.logits(part)
                losses = self.loss.per_element(logits, classes)
                found.append(torch.stack([losses, hits_of(logits, classes).to(losses.dtype)], -1))
        return torch.cat(found).view(*targets.shape, 2)


@dataclass(frozen=True)
class ChunkedLoss(WeightedLoss):
    """A loss that the model's output layers return themselves."""

    layers: OutputLayers

    def take_over(self, *, at_once: bool) -> None:
        self.layers.take_over(at_once=at_once)

    def summing(self, targets: Tensor, weights: Tensor) -> AbstractContextManager[None]:
        return self.layers.given(_Sum(targets, WeightedLoss(self.per_element), weights))

    def sum(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return outputs

    def judging(self, targets: Tensor, by: WeightedLoss | None = None) -> AbstractContextManager[None]:
        return self.layers.given(_Each(targets, by or WeightedLoss(self.per_element)))

    def each(self, outputs: Tensor, targets: Tensor, by: WeightedLoss | None = None) -> Tensor:
        return outputs[..., 0]

    def hits(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[..., 1]


def in_chunks(loss: WeightedLoss, model: nn.Module, chunks: int) -> ChunkedLoss:
    """Return the loss as the model's output layers compute it. Raises InvalidConfiguration where it names none, or some
    that cannot compute it."""
    layers_of = offered(model, "output_layers")
    if layers_of is None:
        raise InvalidConfiguration(
            f"{_FIELD}: the model {type(model).__name__} has no method `output_layers`, which returns the layers from "
            "the last hidden states to the logits; add it, or remove the field"
        )
    layers = list(layers_of())
    # Those of another layer would not be gathered, nor pulled, when the first one computes.
    if not layers or any(True for layer in layers[1:] for _ in layer.parameters()):
        names = ", ".join(type(layer).__name__ for layer in layers) or "none"
        raise InvalidConfiguration(
            f"{_FIELD}: {type(model).__name__}.output_layers() returned {names}; expected a layer, and behind it none "
            "that has parameters"
        )
    return ChunkedLoss(loss.per_element, OutputLayers(layers, chunks))


class _SumOfChunks(torch.autograd.Function):
    """The weighted sum of losses; its gradients are computed with it, or anew for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        layers: OutputLayers,
        loss: WeightedLoss,
        hidden: Tensor,
        targets: Tensor,
        weights: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.layers, ctx.loss, ctx.gradients = layers, loss, None
        kind = hidden.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        if not layers.at_once:
            ctx.save_for_backward(hidden, targets, weights)
            with torch.no_grad():
                parts = layers.chunks(hidden, targets, weights)
                return torch.stack([loss.sum(layers.logits(part), *rest) for part, *rest in parts]).sum()
        total, ctx.gradients = _with_gradients(ctx, hidden, targets, weights, None)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.layers.at_once:
            if ctx.gradients is None:
                raise RuntimeError("the gradients of a chunked loss were taken already: there is one backward pass")
            # Handed over, so that there is never a second copy of them.
            found, ctx.gradients = ctx.gradients, None
            for one in found:
                if one is not None:
                    local_part(one).mul_(gradient)
        else:
            saved: tuple[Tensor, Tensor, Tensor] = ctx.saved_tensors
            _, found = _with_gradients(ctx, *saved, gradient)
        hidden, *parameters = found
        formats = [parameter.dtype for parameter in ctx.layers.trained()]
        cast = (None if one is None else one.to(form) for one, form in zip(parameters, formats, strict=True))
        return None, None, hidden, None, None, *cast


def _with_gradients(
    ctx: Any, hidden: Tensor, targets: Tensor, weights: Tensor, gradient: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the sum, and the gradients of the hidden states and of each trained parameter where they are needed, the
    latter added up over the chunks in FP32 or better. gradient: of the sum; None: 1."""
    layers: OutputLayers = ctx.layers
    parameters = layers.trained()
    needed_of: list[bool] = list(ctx.needs_input_grad)
    of_hidden, of_parameters = needed_of[2], needed_of[5:]
    wanted = [parameter for parameter, needed in zip(parameters, of_parameters, strict=True) if needed]
    kind, number_format, enabled = ctx.autocast
    losses, rows = list[Tensor](), list[Tensor]()
    sums: list[Tensor] = []
    with torch.enable_grad(), torch.autocast(kind, number_format, enabled=enabled):
        for part, *rest in layers.chunks(hidden.detach(), targets, weights):
            own = part.detach().requires_grad_(of_hidden)
            loss = ctx.loss.sum(layers.logits(own), *rest)
            losses.append(loss.detach())
            sources = [own, *wanted] if of_hidden else wanted
            if not sources:
                continue
            found = list(torch.autograd.grad(loss, sources, gradient))
            if of_hidden:
                rows.append(found.pop(0))
            if not sums:
                sums = [one.to(torch.promote_types(one.dtype, torch.float32), copy=True) for one in found]
            else:
                for total, one in zip(sums, found, strict=True):
                    total.add_(one)
    left = iter(sums)
    each = [next(left) if needed else None for needed in of_parameters]
    return torch.stack(losses).sum(), [_joined(rows) if of_hidden else None, *each]


def _joined(rows: list[Tensor]) -> Tensor:
    """Return the rows as one tensor. What is still to be summed over ranks stays so: it is summed once."""
    first = rows[0]
    whole = torch.cat([local_part(one) for one in rows])
    if not isinstance(first, DTensor):
        return whole
    return DTensor.from_local(whole, first.device_mesh, first.placements, run_check=False)
