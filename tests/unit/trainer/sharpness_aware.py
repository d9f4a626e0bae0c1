"""Sharpness-aware minimisation (Foret et al. 2021), which the trainer does not have: its strategy and its rule.

docs/extending.md shows it. An optimizer of the job's own asks for it, where one of the trainer's would have a field.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from disttrain_api.rules.rule import Rule, Values, when
from disttrain_api.spec import JobSpec
from disttrain_trainer.parallel.gradient_norm import total_norm
from disttrain_trainer.parallel.tensor import settle_gradients
from disttrain_trainer.strategies.choose import Choice
from disttrain_trainer.strategies.synchronous import Batch, Synchronous

RADIUS = 0.05


class SharpnessAwareSgd(torch.optim.SGD):
    """SGD with the gradients of SharpnessAware."""


class SharpnessAware(Synchronous):
    """See `Strategy`. The gradient is that of the parameters which are RADIUS further up the gradient."""

    def compute_gradients(self, batch: Batch, weight: float, samples: float) -> Tensor:
        loss = super().compute_gradients(batch, weight, samples)
        moved = [one for one in self.state.parameters if one.grad is not None]
        settle_gradients(moved)
        length = RADIUS / float(total_norm(moved, self.world))
        here = [one.detach().clone() for one in moved]
        with torch.no_grad():
            for one in moved:
                one.add_(one.grad, alpha=length)
            self.state.optimizer.zero_grad()
        super().compute_gradients(batch, weight, samples)
        with torch.no_grad():
            for one, place in zip(moved, here, strict=True):
                one.copy_(place)
        return loss


CHOICE = Choice(
    lambda around: isinstance(around.state.optimizer, SharpnessAwareSgd),
    lambda around: nullcontext(SharpnessAware(around)),
)


def _in_a_pipeline(spec: JobSpec) -> Values | None:
    entrypoint = spec.training.optimizer.entrypoint if spec.training is not None else None
    stages = spec.parallelism.pipeline_parallel_degree or 1
    return when(entrypoint is not None and entrypoint.endswith(":SharpnessAwareSgd") and stages > 1)


RULE = Rule(
    id="SharpnessAwareWithPipeline",
    path="spec.parallelism.pipelineParallelDegree",
    sentence="SharpnessAwareSgd takes two gradients of each batch, which a pipeline does not: use shards",
    check=_in_a_pipeline,
    cel="!has(self.training) || !has(self.training.optimizer.entrypoint)"
    " || !self.training.optimizer.entrypoint.endsWith(':SharpnessAwareSgd')"
    " || !has(self.parallelism.pipelineParallelDegree) || self.parallelism.pipelineParallelDegree == 1",
    reads=("spec.training.optimizer.entrypoint",),
)
