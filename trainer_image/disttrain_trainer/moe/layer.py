"""The layers that a model is built with: a router, and experts that each compute some of the tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_trainer.moe.added_losses import AddLoss
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


class RoutedExperts(nn.Module, ABC):
    """[B, ..., D] -> [B, ..., D]: every token is the sum of what its experts make of it, weighted by their gates.

    A subclass chooses the experts of a token, and sets its router first and then `experts`: initial values are drawn in
    that order. A token that no expert takes becomes zero.
    """

    experts: nn.Module
    """Each of its parameters has a row per expert. It is called with tokens [n, D] in order of experts and the number
    of rows of each expert [E], and takes its parameters through `disttrain_trainer.moe.experts.own`, since with expert
    parallelism a rank has some of the rows."""
    pools_layers = False
    """Whether it adds a loss that is one of all layers together."""

    def __init__(self, count: int, per_token: int, capacity_factor: float | None = None) -> None:
        super().__init__()
        self.count, self.per_token, self.capacity_factor = count, per_token, capacity_factor
        # These are the trainer's to set: what a step wants to know, where the experts are if not all here, and what
        # sorts assignments.
        self.number = 0
        self.step: RoutingOfStep | None = None
        self.exchange: Exchange | None = None
        self.sort: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = sort_by_expert

    @abstractmethod
    def route(self, tokens: Tensor) -> tuple[Tensor, Choice]:
        """Return the router's logits [N, E], at least in FP32, and the experts of each token. tokens: [N, D]."""

    @abstractmethod
    def add_losses(self, outputs: Tensor, choice: Choice, balance: Tensor, z: Tensor, step: RoutingOfStep) -> Tensor:
        """Return the outputs [N, D]; in the backward pass the router also gets the gradients of its own losses.

        balance, z: sums over samples of the load-balancing loss and the z-loss.
        """

    @property
    def idle_parameters(self) -> int:
        """How many parameters of the experts a token is not multiplied with; all experts are as large."""
        return sum(p.numel() for p in self.experts.parameters()) * (self.count - self.per_token) // self.count

    # How many rows an expert gets is known at run time only.
    @torch.compiler.disable
    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(-1, inputs.shape[-1])
        logits, choice = self.route(tokens)
        step = self.step if self.training and self.step is not None and self.step.active else None
        counted = step.counted(len(tokens)) if step else tokens.new_ones(len(tokens), dtype=torch.bool)
        admitted = admit(choice.experts, counted, self.count, self.capacity_factor if self.training else None)
        outputs = self._mix(tokens, choice, admitted)
        if step is not None:
            outputs = self._with_losses(outputs, logits, choice, admitted, step)
        return outputs.view_as(inputs)

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
        assignments = step.assignments(choice.experts, self.count)
        balance = step.mean_over_tokens(balance_losses(choice.probabilities, fractions_of(assignments)))
        z = step.mean_over_tokens(z_losses(logits))
        step.record(self.number, assignments, admitted, balance, z)
        return self.add_losses(outputs, choice, balance, z, step)


class MixtureOfExperts(RoutedExperts):
    """RoutedExperts with a linear router (routing.choose). experts: as in RoutedExperts; width: D."""

    def __init__(
        self, experts: nn.Module, count: int, width: int, *, per_token: int = 2, capacity_factor: float | None = None,
        auxiliary_loss_weight: float = 0.01, z_loss_weight: float = 0.001,
    ) -> None:  # fmt: skip
        super().__init__(count, per_token, capacity_factor)
        self.auxiliary_loss_weight, self.z_loss_weight = auxiliary_loss_weight, z_loss_weight
        self.router = nn.Linear(width, count, bias=False)
        self.experts = experts

    def route(self, tokens: Tensor) -> tuple[Tensor, Choice]:
        # Rounding decides between experts (Switch, section 2.4).
        with torch.autocast(tokens.device.type, enabled=False):
            exact = torch.promote_types(tokens.dtype, torch.float32)
            logits = functional.linear(tokens.to(exact), self.router.weight.to(exact))
        return logits, choose(logits, self.per_token)

    def add_losses(self, outputs: Tensor, choice: Choice, balance: Tensor, z: Tensor, step: RoutingOfStep) -> Tensor:
        return AddLoss.apply(outputs, self.auxiliary_loss_weight * balance + self.z_loss_weight * z, step.gradient)
