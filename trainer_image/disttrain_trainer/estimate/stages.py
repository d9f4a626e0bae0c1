"""A rank's stages of a pipeline without its neighbours: it computes what its schedule says, on inputs that nobody sent.

torch's own schedules would wait for shapes and values of other ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, Schedule1F1B

from disttrain_api.pipeline import SPLIT_BACKWARD_SCHEDULES, microbatches_of, schedule_of
from disttrain_trainer.estimate.counter import SEND, WorkCounter
from disttrain_trainer.moe.step import RoutingOfStep
from disttrain_trainer.optim.precision import build_precision
from disttrain_trainer.parallel.layers import one_tensor
from disttrain_trainer.parallel.pipeline.pipeline import Pipeline
from disttrain_trainer.parallel.pipeline.schedule import RankStage, Schedule
from disttrain_trainer.parallel.pipeline.simulate import Kind, idle_part
from disttrain_trainer.parallel.pipeline.split import split_layers
from disttrain_trainer.parallel.sharded import HALVES, is_sharded
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.mesh import World


class Boundary(NamedTuple):
    """What a stage hands on for one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class Bubble:
    """A pipeline's share of idle time, as its schedule has it."""

    ranks: int
    microbatches: int
    schedule: str
    idle: float
    """0 to 1, if all stages take as long and a backward pass takes twice a forward pass."""


def boundaries_of(
    module: nn.Module, inputs: Tensor, config: Config, world: World, mode: FakeTensorMode
) -> list[Boundary]:
    """What each stage but the last hands on, of a model that is still whole."""
    parallelism, training = config.job.parallelism, config.training
    split = split_layers(module, parallelism, lambda layers: [1.0] * len(layers))
    found: list[Boundary] = []
    # Parts of a sequence: those of the context group, and with `sequenceParallel` those of the tensor group.
    parts = world.mesh.context * (world.mesh.tensor if parallelism.sequence_parallel else 1)
    half = HALVES.get(training.precision) if is_sharded(training, world) else None
    with mode, torch.no_grad(), build_precision(training, world).autocast():
        x: Tensor = mode.from_tensor(inputs)
        for layers in split[:-1]:
            for layer in layers:
                x = one_tensor(layer, layer(x))
            shape = list(x.shape)
            if parts > 1:
                shape[1] //= parts
            found.append(Boundary(tuple(shape), half or x.dtype))
    return found


class ImaginedSchedule:
    """Has the method that a Pipeline calls of torch's schedules."""

    def __init__(
        self,
        pipeline: Pipeline,
        boundaries: Sequence[Boundary],
        counter: WorkCounter,
        forward_done: Callable[[], None],
        pass_done: Callable[[], None],
    ) -> None:
        """forward_done: called before each pass's first backward pass; pass_done: after its last one."""
        self._pipeline, self._counter = pipeline, counter
        self._forward_done, self._pass_done = forward_done, pass_done
        self._boundaries = boundaries
        group = torch.distributed.get_process_group_ranks(pipeline._group)
        self._rank = pipeline.world.rank
        self._actions = pipeline._table[group.index(self._rank)]
        self._rank_of = [group[index] for index in pipeline._index_of]
        self._stages = {stage.stage_index: stage for stage in stages_of(pipeline._schedule)}
        self._loss_of = pipeline._loss_of
        # What is sent stays until a pass is over; 1F1B alone waits for each message before the next one.
        self._keeps_sent = not isinstance(pipeline._schedule, Schedule1F1B)
        self._sent: list[Tensor] = []
        pooled = pipeline.routing.pooled_experts
        self._pooled = torch.ones(pooled, dtype=torch.int64) if pooled else None
        count = range(pipeline._microbatches)
        # As torch does: one buffer for each message that comes, from the first step on.
        self._inputs = {
            (number, one): boundaries[number - 1].empty() for number in self._stages if number for one in count
        }
        self._gradients = {
            (number, one): boundaries[number].empty()
            for number in self._stages
            if number < len(boundaries)
            for one in count
        }

    def step(self, *inputs: Tensor, losses: list[Tensor], **_: Any) -> None:
        """Forward and backward pass of all microbatches, in the order of the schedule."""
        count = self._pipeline._microbatches
        chunks = inputs[0].tensor_split(count) if inputs else ()
        held: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        for stage in self._stages.values():
            self._leave_gradients(stage.submod)
        returning = False
        for action in self._actions:
            at = action.stage, action.microbatch
            if action.kind is Kind.FORWARD:
                x = self._inputs[at].detach().requires_grad_() if action.stage else chunks[action.microbatch]
                stage = self._stages[action.stage]
                last = action.stage == len(self._boundaries)
                summing = self._pipeline.summing(action.microbatch) if last else nullcontext()
                with self._routing(RoutingOfStep.microbatch, action.microbatch), summing:
                    out = end = stage.submod(x)
                if last:
                    end = self._loss_of(out, action.microbatch)  # type: ignore[arg-type]
                    losses.append(end)
                else:
                    self._send(out, action.stage + 1)
                # Outputs stay, too, until their backward pass.
                held[at] = x, out, end
            elif action.kind in (Kind.BACKWARD, Kind.INPUTS):
                if not returning:
                    self._forward_done()
                    returning = True
                x, out, end = held.pop(at)
                with self._routing(partial(RoutingOfStep.again, pooled=self._pooled), action.microbatch):
                    torch.autograd.backward(end, self._gradients.get(at))
                if action.stage:
                    assert x.grad is not None
                    self._send(x.grad, action.stage - 1)
                del x, out, end
        for stage in self._stages.values():
            stage.perform_reduce_grad(1)
        self._sent.clear()
        self._pass_done()

    def _routing(
        self, context: Callable[[RoutingOfStep, Tensor], AbstractContextManager[None]], number: int
    ) -> AbstractContextManager[None]:
        """As torch's stages of the trainer: what layers with experts learn of the microbatch."""
        routing = self._pipeline.routing
        return context(routing, self._pipeline._batches[number].weights) if routing.layers else nullcontext()

    def _send(self, tensor: Tensor, stage: int) -> None:
        peer = self._rank_of[stage]
        if peer != self._rank:
            ranks = tuple(sorted((peer, self._rank)))
            self._counter.add(SEND, ranks, tensor.nbytes)
            if self._pooled is not None:
                self._counter.add(SEND, ranks, self._pooled.nbytes)
            if self._keeps_sent:
                self._sent.append(tensor)

    def _leave_gradients(self, submodule: nn.Module) -> None:
        """As torch's stages: FSDP2 reduces them after the last microbatch."""
        if isinstance(submodule, FSDPModule):
            submodule.set_is_last_backward(False)
            submodule.set_reshard_after_backward(False)
            submodule.set_requires_gradient_sync(False)


def bubble_of(pipeline: Pipeline) -> Bubble:
    """Return the idle part that the schedule's own table of actions gives."""
    schedule = schedule_of(pipeline.parallelism)
    halves = schedule in SPLIT_BACKWARD_SCHEDULES
    pace = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUTS: 1.0, Kind.PARAMETERS: 1.0 if halves else 0.0}
    seconds = {(kind, stage): pace[kind] for kind in Kind for stage in range(len(pipeline._index_of))}
    idle = idle_part(pipeline._table, seconds)
    return Bubble(pipeline.world.mesh.pipeline, microbatches_of(pipeline.parallelism), schedule.value, idle)


def stages_of(schedule: Schedule) -> list[RankStage]:
    """Return the stages of this rank."""
    found = schedule._stages if isinstance(schedule, PipelineScheduleMulti) else [schedule._stage]
    return cast("list[RankStage]", list(found))
