"""What the layers of a model are told of a step, and what they tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_trainer.mesh import World
from disttrain_trainer.moe.routing import assignments_per_expert, imbalance


@dataclass(frozen=True)
class RoutingFigures:
    """What a step's routing was like; tensors stay on the device."""

    sums: Tensor
    """[4], this rank's part of: load-balancing loss and z-loss (means over tokens and layers), assignments dropped,
    assignments."""
    loads: list[Tensor]
    """For each layer [E]: assignments of all ranks to each expert."""

    def metrics(self, world: World) -> dict[str, float]:
        """Figures of all ranks by their name in metrics.jsonl; called by all ranks together."""
        balance, z, dropped, chosen = world.sum_tensor(self.sums * world.speaks).tolist()
        return {
            "moe/load_balancing_loss": balance,
            "moe/z_loss": z,
            "moe/max_load_over_mean": max(imbalance(load) for load in self.loads),
            "moe/dropped_fraction": dropped / max(chosen, 1.0),
        }


class RoutingOfStep:
    """Shared by all layers of a model: what they are told of a microbatch, and the figures of a step's microbatches."""

    def __init__(self) -> None:
        self.gradient = torch.ones(())
        """What a sample's auxiliary loss weighs in the loss that the backward pass starts from."""
        self._weights = torch.ones(0)
        self._counting = False
        self._microbatches = 0
        self._sums: list[Tensor] = []
        self._loads: dict[int, Tensor] = {}

    @contextmanager
    def microbatch(self, weights: Tensor, gradient: Tensor) -> Iterator[None]:
        """A forward pass runs inside; its backward pass comes before the next one.

        weights: those of the samples, [B], 0 for padding; gradient: see the attribute.
        """
        self._weights, self.gradient, self._counting = weights, gradient, True
        yield
        # Recomputation calls the layers again, in the backward pass.
        self._counting = False
        self._microbatches += 1

    def counted(self, tokens: int) -> Tensor:
        """[tokens] of bool: False for the tokens of padding."""
        return self._over(tokens) > 0

    def mean_over_tokens(self, values: Tensor) -> Tensor:
        """Sum over samples of the mean over a sample's tokens. values: [tokens]."""
        each = len(values) // len(self._weights)
        return (values * self._over(len(values)).to(values.dtype)).sum() / each

    def assignments(self, experts: Tensor, count: int) -> Tensor:
        """[count]: how often each expert was chosen on all ranks, which call this together. experts: [N, k].

        Those that are dropped count: the router is to learn of what was too much.
        """
        chosen = assignments_per_expert(experts, self.counted(len(experts)), count)
        if dist.is_initialized():
            # Ranks of a tensor group have the same tokens; counted as often each, they change no part of the whole.
            dist.all_reduce(chosen)
        return chosen

    def record(self, layer: int, assignments: Tensor, admitted: Tensor, balance: Tensor, z: Tensor) -> None:
        """Keep a layer's figures: assignments of all ranks [E], of this rank those admitted [N, k], sums of losses."""
        if not self._counting:
            return
        chosen = self.counted(len(admitted)).sum() * admitted.shape[1]
        figures = (balance.detach(), z.detach(), chosen - admitted.sum(), chosen)
        self._sums.append(torch.stack([figure.to(torch.float64) for figure in figures]))
        self._loads[layer] = assignments + self._loads.get(layer, 0)

    def take_figures(self, samples: float) -> RoutingFigures | None:
        """Of all microbatches since the last call; None of a model without experts. `samples`: those of all ranks."""
        sums, loads, microbatches = self._sums, self._loads, self._microbatches
        self._sums, self._loads, self._microbatches = [], {}, 0
        if not sums:
            return None
        total = torch.stack(sums).sum(0)
        total[:2] /= samples * (len(sums) / microbatches)
        return RoutingFigures(total, list(loads.values()))

    def _over(self, tokens: int) -> Tensor:
        """[tokens]: the weight of each token's sample; samples lie one after the other."""
        return self._weights.repeat_interleave(tokens // len(self._weights))
