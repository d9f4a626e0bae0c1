"""Tensors without memory, and what a step needs of the values that they have not: where tokens go, and how many."""

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from disttrain_trainer.moe.exchange import Exchange
from disttrain_trainer.moe.layer import RoutedExperts
from disttrain_trainer.parallel.expert import expert_layers

_GROUPED = torch.ops.aten._grouped_mm.default


class Shapes(FakeTensorMode):
    """FakeTensorMode that takes grouped products in every number format, as CPUs do; torch's takes BF16 alone."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _GROUPED:
            return _grouped(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _grouped(one: Tensor, other: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """An empty tensor of the product's shape; one of the two, or neither, has a matrix for each group."""
    groups = [len(offs)] if one.dim() == other.dim() == 2 else []
    return one.new_empty([*groups, one.shape[-2], other.shape[-1]])


class EvenExchange(Exchange):
    """Every rank of an expert group gets as many rows."""

    def rows(self, counts: Tensor, own: int) -> list[int]:
        ranks = len(counts)
        return [own // ranks + (rank < own % ranks) for rank in range(ranks)]


def spread_tokens_evenly(module: nn.Module) -> bool:
    """Let each expert of the model get as many tokens, in place; whether there are experts. Again where experts are
    spread over ranks later."""
    layers = expert_layers(module)
    for layer in layers:
        layer.sort = _even(layer)
        if layer.exchange is not None:
            layer.exchange = EvenExchange(layer.exchange.experts, layer.exchange.tensor)
    return bool(layers)


def _even(layer: RoutedExperts) -> Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]:
    def sort(experts: Tensor, admitted: Tensor, count: int) -> tuple[Tensor, Tensor]:
        total = experts.numel()
        if layer.training and layer.capacity_factor is not None:
            total = min(total, count * ceil(layer.capacity_factor * total / count - 1e-9))
        if layer.exchange is not None and layer.exchange.tensor is not None:
            total //= dist.get_world_size(layer.exchange.tensor)
        return experts.new_empty(total), experts.new_empty(count)

    return sort
