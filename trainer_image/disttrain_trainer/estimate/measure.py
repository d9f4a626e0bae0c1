"""What a rank holds, computes and sends, from the trainer's own build and step on tensors that have no memory
(FakeTensorMode)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from disttrain_api.compute import Attention
from disttrain_api.parallelism import PipelineSplit
from disttrain_api.pipeline import is_flushless
from disttrain_trainer.build import assemble, build_sampler
from disttrain_trainer.data.batches import Datasets, load_microbatch
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.estimate.counter import WorkCounter
from disttrain_trainer.estimate.hooked import HookedBuckets
from disttrain_trainer.estimate.imagined import Buckets, ValuesOfOne, imagined_world
from disttrain_trainer.estimate.served import cannot_push, has_servers, of_worker, updates
from disttrain_trainer.estimate.shapes import Shapes, spread_tokens_evenly
from disttrain_trainer.estimate.stages import Boundary, boundaries_of
from disttrain_trainer.estimate.step import StepWork, kept_by, take_step
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.device import allow_attention
from disttrain_trainer.runtime.errors import TrainerError, one_line
from disttrain_trainer.runtime.local import local_part
from disttrain_trainer.runtime.randomness import seed_everything
from disttrain_trainer.state import State
from disttrain_trainer.tasks.base import RunnableTask
from disttrain_trainer.tasks.build import build_task
from disttrain_trainer.tasks.supervised import Supervised

DYNAMIC = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What FakeTensorMode raises where values are asked for."""
EVEN_EXPERTS = "every expert gets as many tokens, which data alone say"


class NotFollowedError(Exception):
    """The model itself cannot be built without values; the message says why."""


@dataclass(frozen=True)
class Estimate:
    """Bytes that one rank needs, and what it does in a step."""

    rank: int
    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    activations: int | None
    """The most that a forward pass adds to what is there before; None where it could not be followed."""
    peak: int | None
    """The most that is there at once in a step; None where it could not be followed."""
    in_host: int | None = None
    """The part of the peak that is in the host's memory where ranks have GPUs."""
    building: int = 0
    """The whole model, which a rank holds before it is cut; none with `metaDevice`."""
    unknown: str | None = None
    """Why activations and peak are not known."""
    assumed: str | None = None
    """What data alone would say, and what was taken for it."""
    work: StepWork | None = None
    """None where no step could be followed; then `unknown` says why."""

    @property
    def held(self) -> int:
        """Bytes at the end of each backward pass."""
        return self.parameters + self.buffers + self.gradients + self.optimizer_state


def estimate(config: Config) -> Estimate:
    """What the rank of `config` needs, whose world need not exist. Raises TrainerError, or NotFollowedError.

    The model is built, cut and wrapped, and takes a step, as in the job; tensors have shapes alone.
    """
    on_meta = config.builds_on_meta
    config = _followed(config)
    reason = cannot_follow(config)
    # Here is no GPU. Its kernels without score matrices hold as much as a CPU's.
    allow_attention(Attention.MATH if config.training.attention is Attention.MATH else None)
    task = build_task(config.training)
    data, missing = _data_of(task)
    if isinstance(task, Supervised):
        task.fill_up()
    with imagined_world(of_worker(config)) as world:
        mode = Shapes()
        counter = WorkCounter()
        settings = config.job.parallelism.data_parallel
        compressed = settings.compression is not None and not has_servers(config)
        buckets = HookedBuckets(counter, config) if compressed else Buckets(counter, settings.all_reduce)
        module = _model(task, config, mode)
        whole = _bytes([*module.parameters(), *module.buffers()])
        has_experts = spread_tokens_evenly(module)
        # Not inside the mode: meshes are made of tensors, whose values count. What is made of the model has none.
        sampler = build_sampler(data, config, world)
        boundaries: list[Boundary] = []
        if world.mesh.pipeline > 1 and (reason or missing) is None:
            slots = sampler.microbatches(Cursor(), world.replica)[0]
            inputs = load_microbatch(task, data.training, slots, world.device.torch).inputs
            try:
                boundaries = boundaries_of(module, inputs, config, world, mode)
            except DYNAMIC as error:
                reason = _without_values(error)
        state = assemble(task, data, sampler, module, config, world, average=buckets.average)
        spread_tokens_evenly(module)
        parameters, buffers = _bytes(state.module.parameters()), _bytes(state.module.buffers())
        # Before the step, which would leave parameters whole where it fails.
        gradients, kept = _held(state, mode)
        if not updates(config):
            state.optimizer.state.clear()
            kept = 0
        found = None
        if reason is None and has_servers(config):
            reason = cannot_push(state, world)
        if reason is None and missing is None:
            try:
                found = take_step(state, world, config, mode, buckets, counter, boundaries)
            except Exception as error:
                reason = _without_values(error)
        return Estimate(
            rank=config.rank,
            parameters=parameters,
            buffers=buffers,
            gradients=gradients,
            optimizer_state=kept,
            activations=None if found is None else found.activations,
            peak=None if found is None else found.peak,
            in_host=None if found is None else found.in_host,
            building=0 if on_meta else whole,
            unknown=reason or missing,
            assumed=EVEN_EXPERTS if has_experts and found is not None else None,
            work=None if found is None else found.work,
        )


def cannot_follow(config: Config) -> str | None:
    """Why a step of the job is not computed; None where it is."""
    parallelism, training = config.job.parallelism, config.training
    pipeline = parallelism.pipeline
    if pipeline is not None and pipeline.split is PipelineSplit.TIME:
        return "stages that take equal times (`pipeline.split`) are known from a measurement alone"
    if (parallelism.devices_per_process or 1) > 1:
        return "a rank with several devices (`devicesPerProcess`) spreads the model over them"
    offload = training.offload
    if offload.parameters or offload.activations:
        return "`training.offload` keeps a part in the host's memory"
    return None


def _without_values(error: Exception) -> str:
    return f"the step cannot be followed without values: {type(error).__name__}: {one_line(error)}"


def _followed(config: Config) -> Config:
    """The config without what changes how tensors are made but not how large they are. Raises NotFollowedError."""
    if is_flushless(config.job.parallelism):
        raise NotFollowedError("PipeDream keeps versions of the parameters for microbatches under way")
    training = config.training
    model = training.model.model_copy(update={"meta_device": False})
    # Weights are not read here.
    changes: dict[str, Any] = {"compile": False, "model": model, "checkpoint": None}
    job = config.job.model_copy(update={"training": training.model_copy(update=changes)})
    return replace(config, job=job)


def _data_of(task: RunnableTask) -> tuple[Datasets, str | None]:
    """The job's data; where this machine does not have them, none, and why."""
    try:
        return task.data(), None
    except TrainerError as error:
        return Datasets([None], None), f"the data cannot be loaded here: {error}"


def _model(task: RunnableTask, config: Config, mode: FakeTensorMode) -> nn.Module:
    """The whole model, without memory. Raises NotFollowedError."""
    seed_everything(config.training.seed)
    try:
        with mode:
            return task.model()
    except DYNAMIC as error:
        raise NotFollowedError(f"the model looks at values while it is built: {one_line(error)}") from error


def _held(state: State, mode: FakeTensorMode) -> tuple[int, int]:
    """Bytes of the gradients and of the optimizer's state, of every trained parameter."""
    with mode:
        for parameter in state.parameters:
            parameter.grad = torch.empty_like(parameter)
        with ValuesOfOne():
            state.optimizer.step()
        gradients = _bytes(one.grad for one in state.parameters if one.grad is not None)
        state.optimizer.zero_grad()
    return gradients, _bytes(kept_by(state))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)
