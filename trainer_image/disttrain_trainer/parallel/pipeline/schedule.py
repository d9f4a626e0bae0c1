"""torch's schedules, built for the stages of a rank, and their tables of actions in our own terms."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from disttrain_api.parallelism import PipelineSchedule
from disttrain_api.pipeline import SINGLE_STAGE_SCHEDULES
from disttrain_trainer.data.batches import Microbatch
from disttrain_trainer.moe.step import RoutingOfStep
from disttrain_trainer.parallel.context.documents import Documents
from disttrain_trainer.parallel.pipeline.pooled_assignments import PooledAssignments
from disttrain_trainer.parallel.pipeline.simulate import Action, Kind, Table
from disttrain_trainer.parallel.sharded import add_up_gradients
from disttrain_trainer.parallel.untouched import Untouched

Schedule = PipelineScheduleSingle | PipelineScheduleMulti

_KINDS = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.INPUTS,
    "BACKWARD_WEIGHT": Kind.PARAMETERS,
}


class RankStage(PipelineStage):
    """A stage of this rank."""

    routing: RoutingOfStep | None = None
    """What layers with experts learn of the microbatch that is computed; None: there are none."""
    pooled: PooledAssignments | None = None
    """What these learn of the layers of other stages; None: nothing."""
    documents: Documents | None = None
    """What learns where the documents of the microbatch begin; None where each sequence is one."""
    microbatch_of: Callable[[int], Microbatch]
    """The microbatches by number, with `routing` or `documents`."""
    summing: Callable[[int], AbstractContextManager[None]]
    """What the forward pass of a microbatch, by its number, runs in where this is the last stage."""
    _untouched: Untouched

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """Find sizes and formats by a pass over tensors that hold nothing; running means are to keep none of it."""
        self._untouched = Untouched([self.submod])
        if self.documents is not None:
            self.documents.use(None)
        with self._with_loss(0):
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise for gradients, for which layers may be computed anew; buffers are then what they were before."""
        found = super()._prepare_backward_infra(*args, **kwargs)
        self._untouched.put_back()
        return found

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Without messages to itself, which torch 2.11 wants where two neighbours lie on one rank, and gloo cannot."""
        found = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in found if operation.peer != dist.get_rank()]

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        with self._forward_pass(fwd_chunk_id), self._with_loss(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        if self.pooled is not None:
            self.pooled.arrive(self.stage_index, bwd_chunk_id)
        with self._backward_pass(bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The gradients of the parameters, which FSDP2 does not see come."""
        with self._backward_pass(bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
            add_up_gradients(self.submod)

    def _with_loss(self, number: int) -> AbstractContextManager[None]:
        return self.summing(number) if self.is_last else nullcontext()

    @contextmanager
    def _forward_pass(self, number: int) -> Iterator[None]:
        self._use_documents(number)
        if self.routing is None:
            yield
            return
        with self.routing.microbatch(self.microbatch_of(number).weights):
            yield
        if self.pooled is not None:
            self.pooled.add(self.stage_index, number, self.routing.of_microbatch)

    def _backward_pass(self, number: int) -> AbstractContextManager[None]:
        self._use_documents(number)
        if self.routing is None:
            return nullcontext()
        pooled = None if self.pooled is None else self.pooled.of(number)
        return self.routing.again(self.microbatch_of(number).weights, pooled)

    def _use_documents(self, number: int) -> None:
        if self.documents is not None:
            microbatch = self.microbatch_of(number)
            self.documents.use(microbatch.starts, microbatch.host_starts)


def build_schedule(
    name: PipelineSchedule, stages: Sequence[PipelineStage], microbatches: int, loss: Callable[[Any, Tensor], Tensor]
) -> Schedule:
    """The schedule of this rank. Losses are sums over the global batch's mean, so gradients are not scaled."""
    kind = get_schedule_class(name.value)
    if issubclass(kind, PipelineScheduleSingle):
        (stage,) = stages
        return kind(stage, microbatches, loss_fn=loss, scale_grads=False)
    return cast("type[PipelineScheduleMulti]", kind)(list(stages), microbatches, loss_fn=loss, scale_grads=False)


def table_of(schedule: Schedule, name: PipelineSchedule, degree: int, microbatches: int) -> Table:
    """Return the computations of each rank, in order."""
    if name in SINGLE_STAGE_SCHEDULES:
        # torch runs these two without a table (the one that it offers for 1F1B is wrong on the last rank).
        return {rank: _fill_and_drain(name, rank, degree, microbatches) for rank in range(degree)}
    order = cast("Mapping[int, Sequence[Any]]", schedule.pipeline_order)
    return {rank: [action for step in steps for action in _actions(step)] for rank, steps in order.items()}


def _fill_and_drain(name: PipelineSchedule, rank: int, degree: int, microbatches: int) -> list[Action]:
    """GPipe: all forward, then all backward. 1F1B: forward until the first gradient can come back, then in turn."""
    ahead = microbatches if name is PipelineSchedule.GPIPE else min(microbatches, degree - rank)
    forward = [Action(Kind.FORWARD, rank, number) for number in range(microbatches)]
    backward = [Action(Kind.BACKWARD, rank, number) for number in range(microbatches)]
    actions = forward[:ahead]
    for number, gradient in enumerate(backward):
        actions.append(gradient)
        actions += forward[ahead + number : ahead + number + 1]
    return actions


def _actions(step: Any) -> Iterator[Action]:
    """A step is None (nothing to do), one computation, or a forward and a backward pass that may overlap."""
    if step is None:
        return
    if step.sub_actions:
        for part in step.sub_actions:
            yield from _actions(part)
    elif step.computation_type.name in _KINDS:
        yield Action(_KINDS[step.computation_type.name], step.stage_index, step.microbatch_index)
