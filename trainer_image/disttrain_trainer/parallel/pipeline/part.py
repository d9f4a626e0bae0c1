"""A rank's part of a pipeline, whatever its schedule: its stages, its neighbours, and batches that only go forward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disttrain_api.parallelism import Parallelism
from disttrain_api.pipeline import index_of_stage
from disttrain_trainer.data.batches import Microbatch
from disttrain_trainer.losses import WeightedLoss
from disttrain_trainer.optim.precision import MixedPrecision
from disttrain_trainer.parallel.context.documents import Documents
from disttrain_trainer.runtime import json_collectives
from disttrain_trainer.runtime.mesh import World


@dataclass
class PipelinePart:
    """This rank's stages."""

    stages: Mapping[int, nn.Module]
    """By number, in order."""
    parallelism: Parallelism
    world: World
    loss: WeightedLoss
    precision: MixedPrecision
    copies: Mapping[nn.Parameter, int] = field(default_factory=dict, kw_only=True)
    """How many pipeline indices hold each of the parameters that several hold."""
    documents: Documents | None = field(default=None, kw_only=True)
    """What learns of each microbatch where its documents begin; None where each sequence is one."""

    def __post_init__(self) -> None:
        self._index_of = index_of_stage(self.parallelism)

    @property
    def first(self) -> bool:
        """Whether this rank takes the inputs."""
        return 0 in self.stages

    @property
    def last(self) -> bool:
        """Whether this rank has the outputs, and with them the loss."""
        return len(self._index_of) - 1 in self.stages

    @property
    def takes_samples(self) -> bool:
        """Whether this rank uses its replica's samples: their inputs, their targets or their documents."""
        return self.first or self.last or self.documents is not None

    def accumulate_gradients(self, microbatches: Sequence[Microbatch], weight: float, replicas: int) -> Tensor:
        """Same as step.accumulate_gradients. Raises NotImplementedError if a pipeline does no step by itself."""
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        """Return entries of metrics.jsonl since this was last asked. Called by all ranks together."""
        return {}

    def computed_seconds(self) -> float:
        """Return for how long this rank's stages have computed since `figures` was last asked, which the device has
        done. Raises NotImplementedError as `accumulate_gradients`."""
        raise NotImplementedError

    def outputs(self, inputs: Tensor) -> Tensor | None:
        """Forward pass of one batch through all stages; None on ranks that do not hold the last one.

        Stages wait for each other, but ranks do not wait for the end: the next batch follows at once.
        """
        x: Tensor | None = inputs
        for number, stage in self.stages.items():
            if number and number - 1 not in self.stages:
                x = self._receive(self._global_rank(number - 1))
            assert x is not None
            x = stage(x)
            if number + 1 < len(self._index_of) and number + 1 not in self.stages:
                self._send(x, self._global_rank(number + 1))
                x = None
        return x if self.last else None

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.world.device_mesh.get_group("pipeline")

    def _global_rank(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self._index_of[stage])

    def _send(self, x: Tensor, rank: int) -> None:
        json_collectives.send(json_collectives.form_of(x), json_collectives.Form, rank)
        dist.send(x.contiguous(), rank)

    def _receive(self, rank: int) -> Tensor:
        shape, dtype = json_collectives.receive(json_collectives.Form, rank)
        x = torch.empty(shape, dtype=dtype, device=self.world.device.channel)
        dist.recv(x, rank)
        return x
