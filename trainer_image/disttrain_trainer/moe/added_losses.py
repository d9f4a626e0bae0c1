"""Losses of layers with experts that join the gradient where they are.

A loss then needs no way out of the model, whatever wraps it: DDP, FSDP2 and recomputation know outputs only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from disttrain_trainer.moe.routing import fractions_of
from disttrain_trainer.moe.step import RoutingOfStep


class AddLoss(torch.autograd.Function):
    """`outputs` unchanged; `loss` gets `gradient` in the backward pass, as if it were added to the model's loss."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient.to(loss.dtype)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.gradient, None


class AddPooledLoss(torch.autograd.Function):
    """`outputs` unchanged; `probabilities` [N, E] get the gradient of `weight` times E sum_e f_e P_e, where f_e is the
    part of all assignments that went to an expert and P_e its mean probability, both of all layers together.

    The parts are asked for in the backward pass: when a layer is computed, the ones behind it have not counted yet.
    """

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, probabilities: Tensor, weight: float, step: RoutingOfStep) -> Tensor:
        ctx.step, ctx.weight, ctx.gradient = step, weight, step.gradient
        ctx.save_for_backward(step.part_of_each(len(probabilities), probabilities.dtype))
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (parts,) = ctx.saved_tensors
        fractions = fractions_of(ctx.step.assignments_of_microbatch).to(parts.dtype)
        scale = ctx.gradient.to(parts.dtype) * (ctx.weight * len(fractions) / ctx.step.layers)
        return gradient, scale * parts.unsqueeze(1) * fractions, None, None
