"""The layer that a model is built with: a router, and experts that each compute some of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_trainer.moe.exchange import Exchange
from disttrain_trainer.moe.routing import (
    Choice,
    admit,
    balance_losses,
    choose,
    fractions_of,
    sort_by_expert,
    z_losses,
)
from disttrain_trainer.moe.step import RoutingOfStep


class MixtureOfExperts(nn.Module):
    """[B, ..., D] -> [B, ..., D]: every token is the sum of what its experts make of it, weighted by their gates.

    experts: a module whose every parameter has a row per expert, called with tokens [n, D] in order of experts and the
    number of rows of each expert [E]; it takes its parameters through `disttrain_trainer.moe.experts.own`, since with
    expert parallelism a rank has some of the rows. A token that no expert takes becomes zero.
    """

    def __init__(
        self, experts: nn.Module, count: int, width: int, *, per_token: int = 2, capacity_factor: float | None = None,
        auxiliary_loss_weight: float = 0.01, z_loss_weight: float = 0.001,
    ) -> None:  # fmt: skip
        super().__init__()
        self.count, self.per_token, self.capacity_factor = count, per_token, capacity_factor
        self.auxiliary_loss_weight, self.z_loss_weight = auxiliary_loss_weight, z_loss_weight
        self.router = nn.Linear(width, count, bias=False)
        self.experts = experts
        # These are the trainer's to set: what a step wants to know, where the experts are if not all here, and what
        # sorts assignments.
        self.number = 0
        self.step: RoutingOfStep | None = None
        self.exchange: Exchange | None = None
        self.sort: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = sort_by_expert

    @property
    def idle_parameters(self) -> int:
        """How many parameters of the experts a token is not multiplied with; all experts are as large."""
        return sum(p.numel() for p in self.experts.parameters()) * (self.count - self.per_token) // self.count

    # How many rows an expert gets is known at run time only.
    @torch.compiler.disable
    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(-1, inputs.shape[-1])
        logits = self._logits(tokens)
        choice = choose(logits, self.per_token)
        step = self.step if self.training and self.step is not None and self.step.active else None
        counted = step.counted(len(tokens)) if step else tokens.new_ones(len(tokens), dtype=torch.bool)
        admitted = admit(choice.experts, counted, self.count, self.capacity_factor if self.training else None)
        outputs = self._mix(tokens, choice, admitted)
        if step is not None:
            outputs = self._with_losses(outputs, logits, choice, admitted, step)
        return outputs.view_as(inputs)

    def _logits(self, tokens: Tensor) -> Tensor:
        """[N, E], at least in FP32: rounding decides between experts (Switch, section 2.4)."""
        with torch.autocast(tokens.device.type, enabled=False):
            exact = torch.promote_types(tokens.dtype, torch.float32)
            return functional.linear(tokens.to(exact), self.router.weight.to(exact))

    def _mix(self, tokens: Tensor, choice: Choice, admitted: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        gates, exchange = choice.gates, self.exchange
        if exchange is not None:
            tokens, gates = exchange.enter(tokens), exchange.enter(gates)
            admitted = admitted & exchange.share(len(tokens), tokens.device).unsqueeze(1)
        assignments, counts = self.sort(choice.experts, admitted, self.count)
        token = assignments // self.per_token
        rows = tokens.index_select(0, token)
        results = exchange.compute(self.experts, rows, counts) if exchange else self.experts(rows, counts)
        weighted = results * gates.flatten().index_select(0, assignments).unsqueeze(1)
        mixed = weighted.new_zeros(tokens.shape).index_add(0, token, weighted)
        return (exchange.leave(mixed) if exchange else mixed).to(tokens.dtype)

    def _with_losses(
        self, outputs: Tensor, logits: Tensor, choice: Choice, admitted: Tensor, step: RoutingOfStep
    ) -> Tensor:
        """The outputs; in the backward pass the router also gets the gradients of its own losses."""
        assignments = step.assignments(choice.experts, self.count)
        balance = step.mean_over_tokens(balance_losses(choice.probabilities, fractions_of(assignments)))
        z = step.mean_over_tokens(z_losses(logits))
        step.record(self.number, assignments, admitted, balance, z)
        loss = self.auxiliary_loss_weight * balance + self.z_loss_weight * z
        return _AddLoss.apply(outputs, loss, step.gradient)


class _AddLoss(torch.autograd.Function):
    """`outputs` unchanged; `loss` gets `gradient` in the backward pass, as if it were added to the model's loss.

    So the loss needs no way out of the model, whatever wraps it: DDP, FSDP2 and recomputation know outputs only.
    """

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient.to(loss.dtype)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.gradient, None
