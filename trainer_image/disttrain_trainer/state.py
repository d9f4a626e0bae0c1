"""All that changes while a job trains, as one value that a checkpoint can hold."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from disttrain_trainer.callbacks import Callbacks
from disttrain_trainer.data.ahead import ReadAhead
from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.data.loading import Loader
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.metrics.flops import Work
from disttrain_trainer.moe.step import RoutingOfStep
from disttrain_trainer.optim.precision import MixedPrecision
from disttrain_trainer.optim.step_guard import StepGuard
from disttrain_trainer.parallel.comm_hooks.base import GradientSum
from disttrain_trainer.parallel.layer_order import LayerOrder
from disttrain_trainer.parallel.local_sgd.replicas import Replicas
from disttrain_trainer.parallel.pipeline.part import PipelinePart
from disttrain_trainer.tasks.base import RunnableTask
from disttrain_trainer.tasks.figures import Figures


@dataclass
class State:
    """A training run between two steps."""

    module: nn.Module
    """The user's model, by whose parameter names checkpoints are written."""
    model: nn.Module
    """The model as it is called in a step: the module, wrapped by the techniques of the recipe."""
    optimizer: torch.optim.Optimizer
    precision: MixedPrecision
    task: RunnableTask
    """What is trained: batches, their loss and figures."""
    data: Datasets
    sampler: Sampler
    loader: Loader | ReadAhead | None
    """What reads samples ahead, in processes of its own; None where this rank reads them itself."""
    routing: RoutingOfStep
    """What the layers with experts, if there are any, are told of each microbatch."""
    average_whole: Callable[[], None] = lambda: None
    """Averages the gradients of parameters that shards leave whole."""
    layer_order: LayerOrder | None = None
    """What this rank calls of a model that is cut over several, who must call the same."""
    gradient_sum: GradientSum | None = None
    """How the replicas' gradients are summed; None where DDP does not sum them."""
    replicas: Replicas | None = None
    """How replicas that train alone meet; None where gradients are summed in every step."""
    work: Work = field(default_factory=Work)
    """FLOPs of the whole model, whatever this rank holds of it."""
    offload_activations: bool = False
    takes_no_sparse_gradient: str | None = None
    """What of the job does not, in words; None where all does."""
    pipeline: PipelinePart | None = None
    """This rank's part of a pipeline, which then takes the place of `model`."""
    guard: StepGuard | None = None
    """What says which steps are skipped; None where none is."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    """Code of the user's that is called between steps."""
    input_multiple: int = 1
    """Inputs of `data.choices` and `data.prompts` are filled up to a multiple of it, to be cut over ranks."""
    cursor: Cursor = field(default_factory=Cursor)
    figures: Figures = field(default_factory=Figures)
    """Figures of the task since the last logged step, beside the loss."""
    step: int = 0
    """Optimizer steps done."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that are trained."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def takes_samples(self) -> bool:
        """Whether this rank uses its replica's samples: their inputs, targets or documents, or which are padding."""
        pipeline, routing = self.pipeline, self.routing
        return pipeline is None or pipeline.takes_samples or routing.layers > 0
