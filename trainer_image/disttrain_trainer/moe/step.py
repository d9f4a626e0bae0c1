"""What the layers of a model are told of a step, and what they tell of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_trainer.mesh import World
from disttrain_trainer.moe.routing import assignments_per_expert, fractions_of, imbalance


@dataclass
class _Seen:
    """A layer's part in a microbatch. The sums of losses are those over samples of the mean over a sample's tokens."""

    assignments: Tensor
    """[E], of all ranks."""
    fractions: Tensor
    """[E], the part of them that went to each expert."""
    chosen: Tensor
    """Assignments of this rank."""
    dropped: Tensor
    """Those that were not computed."""
    balance: Tensor | float = 0.0
    z: Tensor | float = 0.0


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
    """Shared by all layers of a model. `expect` comes before the forward pass of each microbatch.

    Recomputation calls a layer twice for a microbatch: what is kept is kept by layer and microbatch, so that nothing is
    counted or sent twice.
    """

    def __init__(self) -> None:
        self.gradient = torch.ones(())
        """What a sample's auxiliary loss weighs in the loss that the backward pass starts from."""
        self._microbatch = 0
        self._weights = torch.ones(0)
        self._seen: dict[tuple[int, int], _Seen] = {}

    def expect(self, microbatch: int, weights: Tensor, gradient: Tensor) -> None:
        """The number of the microbatch in its step, from 0 on; the weights of its samples, [B], 0 for padding."""
        if microbatch == 0:
            self._seen.clear()
        self._microbatch, self._weights, self.gradient = microbatch, weights, gradient

    def counted(self, tokens: int) -> Tensor:
        """[tokens] of bool: False for the tokens of padding."""
        return self._over(tokens) > 0

    def mean_over_tokens(self, values: Tensor) -> Tensor:
        """Sum over samples of the mean over a sample's tokens. values: [tokens]."""
        each = len(values) // len(self._weights)
        return (values * self._over(len(values)).to(values.dtype)).sum() / each

    def fractions(self, layer: int, experts: Tensor, admitted: Tensor, count: int) -> Tensor:
        """[E]: the part of all ranks' assignments that went to each expert. experts, admitted: [N, k].

        All ranks call it together. Dropped assignments count: the router is to learn of what was too much.
        """
        key = (layer, self._microbatch)
        if key not in self._seen:
            counted = self.counted(len(experts))
            assignments = assignments_per_expert(experts, counted, count)
            chosen = assignments.sum()
            if dist.is_initialized():
                # Ranks of a tensor group have the same tokens; counted as often each, they change no fraction.
                dist.all_reduce(assignments)
            self._seen[key] = _Seen(assignments, fractions_of(assignments), chosen, chosen - admitted.sum())
        return self._seen[key].fractions

    def record_losses(self, layer: int, balance: Tensor, z: Tensor) -> None:
        """This rank's sums, for the metrics."""
        seen = self._seen[layer, self._microbatch]
        seen.balance, seen.z = balance.detach(), z.detach()

    def figures(self, samples: float) -> RoutingFigures | None:
        """Of all microbatches since the first one; None of a model without experts. `samples`: those of all ranks."""
        if not self._seen:
            return None
        loads: dict[int, Tensor] = {}
        for (layer, _), seen in self._seen.items():
            loads[layer] = loads.get(layer, 0) + seen.assignments
        share = samples * len(loads)
        parts = [(one.balance / share, one.z / share, one.dropped, one.chosen) for one in self._seen.values()]
        sums = [torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in column]).sum()
                for column in zip(*parts, strict=True)]  # fmt: skip
        return RoutingFigures(torch.stack(sums), list(loads.values()))

    def _over(self, tokens: int) -> Tensor:
        """[tokens]: the weight of each token's sample; samples lie one after the other."""
        return self._weights.repeat_interleave(tokens // len(self._weights))
