"""Pipeline parallelism: the layers lie on ranks one after the other, microbatches flow through them.

Schedules are torch.distributed.pipelining's: GPipe (Huang et al. 2019), 1F1B (PipeDream-flush, Narayanan et al. 2021),
interleaved 1F1B (ibid.), looped breadth-first (Lamy-Poirier 2023), zero bubble and ZBV (Qi et al. 2024), DualPipeV
(DeepSeek-AI 2025). All compute the same gradients.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from disttrain_api.pipeline import microbatches_of, schedule_of
from disttrain_trainer.data.batches import Microbatch
from disttrain_trainer.moe.step import RoutingOfStep
from disttrain_trainer.parallel.data_parallel import average_gradients
from disttrain_trainer.parallel.pipeline.bubble import Rows, bubbles_of, measured_of, rows_of
from disttrain_trainer.parallel.pipeline.clock import StageClock
from disttrain_trainer.parallel.pipeline.part import PipelinePart
from disttrain_trainer.parallel.pipeline.pooled_assignments import PooledAssignments
from disttrain_trainer.parallel.pipeline.schedule import RankStage, Schedule, build_schedule, table_of
from disttrain_trainer.parallel.pipeline.simulate import splits_backward
from disttrain_trainer.parallel.shardable import average_whole, left_whole
from disttrain_trainer.parallel.sharded import reduce_gradients
from disttrain_trainer.parallel.tensor import settle_gradients
from disttrain_trainer.runtime.errors import own_errors
from disttrain_trainer.runtime.local import local_part


@dataclass
class Pipeline(PipelinePart):
    """This rank's stages, and how microbatches flow through them in every step."""

    routing: RoutingOfStep
    """What layers with experts learn of the microbatch that is computed."""
    passes: int
    """Passes through the pipeline in an optimizer step: the accumulation."""
    shared: Sequence[tuple[nn.Parameter, dist.ProcessGroup]]
    """Parameters that ranks of other pipeline indices hold, too, and those ranks."""
    _batches: list[Microbatch] = field(default_factory=list)
    _scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._microbatches = microbatches_of(self.parallelism)
        self._clock = StageClock(self.world.device)
        experts = self.routing.pooled_experts
        self._pooled = PooledAssignments(experts, self._index_of, self._group) if experts else None
        self._schedule = self._build()
        self._table = table_of(
            self._schedule, schedule_of(self.parallelism), self.world.mesh.pipeline, self._microbatches
        )
        self._splits_backward = splits_backward(self._table)

    def accumulate_gradients(self, microbatches: Sequence[Microbatch], weight: float, replicas: int) -> Tensor:
        """Same as step.accumulate_gradients; the microbatches are needed where `State.takes_samples` says so."""
        total = torch.zeros((), device=self.world.device.torch)
        scale = replicas * self.precision.scale
        self._scale = scale / weight
        for number in range(self.passes):
            for stage in self.stages.values():
                reduce_gradients(stage, now=number == self.passes - 1)
            self._batches = list(microbatches[number * self._microbatches : (number + 1) * self._microbatches])
            total = total + self._pass() / scale
        parameters = [parameter for stage in self.stages.values() for parameter in stage.parameters()]
        if not any(isinstance(stage, FSDPModule) for stage in self.stages.values()):
            average_gradients(parameters, self.world)
        average_whole(left_whole(self.stages.values()), self.world)
        settle_gradients(parameters)
        if self._splits_backward:
            lay_gradients_out(parameters)
        for parameter, group in self.shared:
            _sum(parameter, group)
        return total

    def figures(self) -> dict[str, float]:
        """The bubble since this was last asked, measured and as the schedule has it; collective, for rank 0 alone."""
        everyone = [measured_of(rows) for rows in self.world.gather(rows_of(self._clock.take()), Rows)]
        return bubbles_of(everyone, self._table) if self.world.first else {}

    def computed_seconds(self) -> float:
        return self._clock.computed()

    def _build(self) -> Schedule:
        stages = [
            RankStage(stage, number, len(self._index_of), self.world.device.channel, group=self._group)
            for number, stage in self.stages.items()
        ]
        for stage in stages:
            self._clock.watch(stage)
            stage.microbatch_of = lambda number: self._batches[number]
            stage.documents = self.documents
            stage.summing = self.summing
            if self.routing.layers:
                stage.routing, stage.pooled = self.routing, self._pooled
        return build_schedule(schedule_of(self.parallelism), stages, self._microbatches, self._loss_of)

    def _pass(self) -> Tensor:
        """Forward and backward pass of `_batches`; the sum of their scaled losses, 0 where the last stage is not."""
        losses: list[Tensor] = []
        inputs = (torch.cat([batch.inputs for batch in self._batches]),) if self.first else ()
        # torch cuts one tensor into microbatches: it gets their numbers, so that a target may be anything.
        target = torch.arange(self._microbatches) if self.last else None
        with own_errors(), self._clock.step():
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
            if self._pooled is not None:
                self._pooled.end_pass()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())

    def summing(self, number: int) -> AbstractContextManager[None]:
        """The forward pass of a microbatch in the last stage runs inside."""
        batch = self._batches[number]
        return self.loss.summing(batch.targets, batch.weights)

    def _loss_of(self, outputs: Tensor, number: Tensor) -> Tensor:
        batch = self._batches[int(number)]
        with self.precision.autocast():
            loss = self.loss.sum(outputs, batch.targets, batch.weights) * self._scale
        self._clock.prolong_forward(len(self._index_of) - 1)
        return loss


def lay_gradients_out(parameters: Iterable[nn.Parameter]) -> None:
    """Give each gradient the strides of its parameter, which fused optimizers take for granted.

    Autograd sees to it where it adds gradients up itself; torch's schedules keep those that they compute without the
    gradients of the inputs as they come.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            continue
        if local_part(gradient).stride() != local_part(parameter).stride():
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def _sum(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    if parameter.grad is not None:
        dist.all_reduce(local_part(parameter.grad), group=group)
