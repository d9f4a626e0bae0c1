"""State that the layers of a model share in a step, and the figures that they report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_trainer.moe.routing import assignments_per_expert, imbalance
from disttrain_trainer.runtime.mesh import World


@dataclass(frozen=True)
class RoutingFigures:
    """Routing figures of a step; tensors stay on the device."""

    sums: Tensor
    """[5], this rank's part of: load-balancing loss and z-loss (means over tokens, summed over layers), assignments
    dropped, assignments, layers."""
    loads: list[Tensor]
    """For each layer of this rank [E]: assignments of all ranks to each expert."""

    def metrics(self, world: World) -> dict[str, float]:
        """Figures of all ranks by their name in metrics.jsonl; called by all ranks together."""
        balance, z, dropped, chosen, layers = world.sum_tensor(self.sums * world.computes_first).tolist()
        layers /= world.parts
        busiest = max((imbalance(load) for load in self.loads), default=0.0)
        if world.mesh.pipeline > 1:
            # Each of its ranks knows its own layers only.
            busiest = float(world.max_tensor(torch.tensor(busiest, dtype=torch.float64)))
        return {
            "moe/load_balancing_loss": balance / layers,
            "moe/z_loss": z / layers,
            "moe/max_load_over_mean": busiest,
            "moe/dropped_fraction": dropped / max(chosen, 1.0),
        }


class RoutingOfStep:
    """Shared by all layers of a model: facts of the current microbatch, and the figures of a step's microbatches."""

    def __init__(
        self, layers: int = 1, group: dist.ProcessGroup | None = None, context: int = 1, pooled_experts: int = 0
    ) -> None:
        """layers: with experts, of the whole model; group: the ranks that compute the same layers, None for all;
        context: ranks that have a part of the tokens of each sample; pooled_experts: see below."""
        self.gradient = torch.ones(())
        """What a sample's auxiliary loss weighs in the loss that the backward pass starts from."""
        self.layers = layers
        self.pooled_experts = pooled_experts
        """Experts of a layer, where layers add a loss that is one of all layers together; otherwise 0."""
        self._group, self._context = group, context
        self._weights: Tensor | None = None
        self._counting = False
        self._sums: list[Tensor] = []
        self._loads: dict[int, Tensor] = {}
        self.of_microbatch: list[Tensor] = []
        """[E] each: how often each expert was chosen on all ranks, in each layer that has had the microbatch; in the
        backward passes of a pipeline, with `pooled_experts`, in all layers together."""

    @property
    def active(self) -> bool:
        """Whether a microbatch is being computed; a pipeline tries its layers without one, to learn shapes."""
        return self._weights is not None

    @contextmanager
    def microbatch(self, weights: Tensor) -> Iterator[None]:
        """A forward pass runs inside; its backward pass comes before the next one, or inside of `again`.

        weights: those of the samples, [B], 0 for padding.
        """
        self._weights, self._counting, self.of_microbatch = weights, True, []
        yield
        # Recomputation calls the layers again, in the backward pass.
        self._counting = False

    @contextmanager
    def again(self, weights: Tensor, pooled: Tensor | None = None) -> Iterator[None]:
        """The backward pass of a microbatch runs inside, after others were computed (pipelines).

        pooled: [E], how often each expert was chosen for the microbatch in all layers, with `pooled_experts`.
        """
        self._weights = weights
        if pooled is not None:
            self.of_microbatch = [pooled.to(weights.device)]
        yield

    def counted(self, tokens: int) -> Tensor:
        """[tokens] of bool: False for the tokens of padding."""
        return self._over(tokens) > 0

    def mean_over_tokens(self, values: Tensor) -> Tensor:
        """Sum over samples of the mean over a sample's tokens, this rank's part of it. values: [tokens]."""
        return (values * self._over(len(values)).to(values.dtype)).sum() / self._of_sample(len(values))

    def part_of_each(self, tokens: int, number_format: torch.dtype) -> Tensor:
        """[tokens]: what each token counts for in `mean_over_tokens`."""
        return self._over(tokens).to(number_format) / self._of_sample(tokens)

    @property
    def assignments_of_microbatch(self) -> Tensor:
        """[E]: how often each expert was chosen in the current microbatch, on all ranks and in all layers."""
        return torch.stack(self.of_microbatch).sum(0)

    def assignments(self, experts: Tensor, count: int) -> Tensor:
        """[count]: how often each expert was chosen on all ranks, which call this together. experts: [N, k].

        Those that are dropped count: the router is to learn of what was too much.
        """
        chosen = assignments_per_expert(experts, self.counted(len(experts)), count)
        if dist.is_initialized():
            # Ranks of a tensor group have the same tokens; counted as often each, they change no part of the whole.
            dist.all_reduce(chosen, group=self._group)
        return chosen

    def record(self, layer: int, assignments: Tensor, admitted: Tensor, balance: Tensor, z: Tensor) -> None:
        """Keep a layer's figures: assignments of all ranks [E], of this rank those admitted [N, k], sums of losses."""
        if not self._counting:
            return
        chosen = self.counted(len(admitted)).sum() * admitted.shape[1]
        figures = (balance.detach(), z.detach(), chosen - admitted.sum(), chosen, torch.ones_like(chosen))
        self._sums.append(torch.stack([figure.to(torch.float64) for figure in figures]))
        self._loads[layer] = assignments + self._loads.get(layer, 0)
        self.of_microbatch.append(assignments)

    def take_figures(self, samples: float, microbatches: int) -> RoutingFigures | None:
        """Return the figures of all microbatches since the last call, whose number on each rank is given; None without
        experts.

        samples: those of all ranks.
        """
        sums, loads = self._sums, self._loads
        self._sums, self._loads = [], {}
        if not self.layers:
            return None
        # A rank of a pipeline may hold none of the layers.
        total = torch.stack(sums).sum(0) if sums else torch.zeros(5, dtype=torch.float64)
        total[:2] /= samples
        total[4] /= microbatches
        return RoutingFigures(total, list(loads.values()))

    def _of_sample(self, tokens: int) -> int:
        """Tokens of a whole sample, where this rank has so many of all samples."""
        assert self._weights is not None
        return tokens // len(self._weights) * self._context

    def _over(self, tokens: int) -> Tensor:
        """[tokens]: the weight of each token's sample; samples lie one after the other."""
        assert self._weights is not None
        return self._weights.repeat_interleave(tokens // len(self._weights))
