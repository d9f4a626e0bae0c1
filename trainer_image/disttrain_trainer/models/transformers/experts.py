"""The library's experts as a layer of the trainer's: routed as the library does, computed and spread as the trainer's.

Shapes: N tokens, D width, E experts, F hidden width.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from disttrain_trainer.models.transformers.families import Family
from disttrain_trainer.moe.added_losses import AddPooledLoss
from disttrain_trainer.moe.experts import grouped_linear, own
from disttrain_trainer.moe.layer import RoutedExperts
from disttrain_trainer.moe.routing import Choice
from disttrain_trainer.moe.step import RoutingOfStep

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class SparseBlock(RoutedExperts):
    """[B, T, D] -> [B, T, D]: a feed-forward part with experts, under the library's names."""

    def __init__(self, family: Family, config: PreTrainedConfig) -> None:
        count, per_token = config.num_local_experts, config.num_experts_per_tok
        super().__init__(count, per_token)
        self.gate = family.part("TopKRouter")(config)
        self.experts = _stacked(family.part("Experts"))(config)
        # The library adds its loss where the config asks for the router's logits.
        self.loss_weight = float(config.router_aux_loss_coef) if config.output_router_logits else 0.0
        self.pools_layers = bool(self.loss_weight)

    def route(self, tokens: Tensor) -> tuple[Tensor, Choice]:
        # At least in FP32 also with autocast and weights in half precision: rounding decides between experts.
        with torch.autocast(tokens.device.type, enabled=False):
            exact = torch.promote_types(tokens.dtype, torch.float32)
            weights = {"weight": self.gate.weight.to(exact)}
            logits, gates, experts = functional_call(self.gate, weights, (tokens.to(exact),))
        return logits, Choice(experts, gates, logits.softmax(-1))

    def add_losses(self, outputs: Tensor, choice: Choice, balance: Tensor, z: Tensor, step: RoutingOfStep) -> Tensor:
        """As the library: parts of tokens, not of assignments, and all layers together."""
        if not self.pools_layers:
            return outputs
        return AddPooledLoss.apply(outputs, choice.probabilities, self.loss_weight * self.per_token, step)


def compute_by_experts(layer: nn.Module, family: Family, config: PreTrainedConfig) -> None:
    """Put a SparseBlock into the place of the library's in a decoder layer, if it has one."""
    if family.experts is not None and isinstance(layer.mlp, family.part("SparseMoeBlock")):
        layer.mlp = SparseBlock(family, config)


def initialise_experts(family: Family, config: PreTrainedConfig, layer: nn.Module) -> None:
    """Give values to what a router or experts hold, as the library does; nothing for any other layer."""
    if family.experts is not None and isinstance(layer, (family.part("TopKRouter"), family.part("Experts"))):
        for parameter in layer.parameters(recurse=False):
            nn.init.normal_(parameter, std=config.initializer_range)


@cache
def _stacked(library: type[nn.Module]) -> type[nn.Module]:
    class StackedExperts(library):  # type: ignore[valid-type, misc]
        """The library's weights, a row per expert: `gate_up_proj` [E, 2 F, D] and `down_proj` [E, D, F]."""

        def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
            """[n, D] -> [n, D]: the first counts[0] rows are the first expert's, and so on."""
            both = grouped_linear(tokens, own(self.gate_up_proj).transpose(1, 2), counts)
            gate, up = both.chunk(2, dim=-1)
            return grouped_linear(self.act_fn(gate) * up, own(self.down_proj).transpose(1, 2), counts)

    return StackedExperts
