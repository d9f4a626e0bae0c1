"""All that changes while a job trains, as one value that a checkpoint can hold."""

from dataclasses import dataclass, field

import torch
from torch import nn

from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.flops import Work
from disttrain_trainer.losses import WeightedLoss
from disttrain_trainer.precision import MixedPrecision


@dataclass
class State:
    """A training run between two steps."""

    module: nn.Module
    """The user's model, by whose parameter names checkpoints are written."""
    model: nn.Module
    """The model as it is called in a step: the module, wrapped by the techniques of the recipe."""
    optimizer: torch.optim.Optimizer
    precision: MixedPrecision
    loss: WeightedLoss
    data: Datasets
    sampler: Sampler
    work: Work = field(default_factory=Work)
    """FLOPs of the whole model, whatever this rank holds of it."""
    offload_activations: bool = False
    cursor: Cursor = field(default_factory=Cursor)
    step: int = 0
    """Optimizer steps done."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that are trained."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
