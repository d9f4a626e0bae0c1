"""The memory of a rank, from the trainer's own build and step on tensors that have no memory (FakeTensorMode)."""

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

from disttrain_api.parallelism import DataParallelMode
from disttrain_api.pipeline import is_flushless
from disttrain_trainer.build import assemble, build_sampler
from disttrain_trainer.data.batches import Datasets, Microbatch, load_microbatch, map_tensors
from disttrain_trainer.estimate.imagined import Buckets, ValuesOfOne, WatchedPrecision, imagined_world
from disttrain_trainer.estimate.meter import StorageMeter
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import TrainerError, one_line
from disttrain_trainer.runtime.local import local_part
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import seed_everything
from disttrain_trainer.state import State
from disttrain_trainer.step import accumulate_gradients, clip_gradients
from disttrain_trainer.tasks.base import RunnableTask
from disttrain_trainer.tasks.build import build_task

DYNAMIC = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What FakeTensorMode raises where values are asked for."""
MICROBATCHES = 2
"""Of a step, so many are computed at most: from the second on the memory is the same."""


class NotFollowedError(Exception):
    """The model itself cannot be built without values; the message says why."""


@dataclass(frozen=True)
class Estimate:
    """Bytes that one rank needs."""

    rank: int
    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    activations: int | None
    """The most that a forward pass adds to what is there before; None where it could not be followed."""
    peak: int | None
    """The most that is there at once in a step; None where it could not be followed."""
    building: int = 0
    """The whole model, which a rank holds before it is cut; none with `metaDevice`."""
    unknown: str | None = None
    """Why activations and peak are not known."""

    @property
    def held(self) -> int:
        """Bytes at the end of each backward pass."""
        return self.parameters + self.buffers + self.gradients + self.optimizer_state


def estimate(config: Config) -> Estimate:
    """The memory of the rank of `config`, whose world need not exist. Raises TrainerError, or NotFollowedError.

    The model is built, cut and wrapped, and takes a step, as in the job; tensors have shapes alone.
    """
    on_meta = config.training.model.meta_device
    config = _followed(config)
    reason = cannot_follow(config)
    task = build_task(config.training)
    data, missing = _data_of(task)
    with imagined_world(config) as world:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        buckets = Buckets()
        module = _model(task, config, mode)
        whole = _bytes([*module.parameters(), *module.buffers()])
        # Not inside the mode: meshes are made of tensors, whose values count. What is made of the model has none.
        sampler = build_sampler(data, config, world)
        state = assemble(task, data, sampler, module, config, world, average=buckets.average)
        parameters, buffers = _bytes(state.module.parameters()), _bytes(state.module.buffers())
        # Before the step, which would leave parameters whole where it fails.
        gradients, kept = _held(state, mode)
        found = None
        if reason is None and state.routing.layers:
            reason = "which tokens go to which expert is known from data alone"
        if reason is None and missing is None:
            try:
                found = _take_step(state, world, mode, buckets)
            except Exception as error:
                reason = f"the step cannot be followed without values: {type(error).__name__}: {one_line(error)}"
        return Estimate(
            rank=config.rank,
            parameters=parameters,
            buffers=buffers,
            gradients=gradients,
            optimizer_state=kept,
            activations=found and found[0],
            peak=found and found[1],
            building=0 if on_meta else whole,
            unknown=reason or missing,
        )


def cannot_follow(config: Config) -> str | None:
    """Why a step of the job is not computed; None where it is."""
    parallelism, training = config.job.parallelism, config.training
    if (parallelism.pipeline_parallel_degree or 1) > 1:
        return "stages of a pipeline wait for what other ranks send"
    if (parallelism.devices_per_process or 1) > 1:
        return "a rank with several devices (`devicesPerProcess`) spreads the model over them"
    if parallelism.data_parallel.relaxed is not None:
        return f"mode {parallelism.data_parallel.mode.value} keeps what replicas train from beside the model"
    if parallelism.data_parallel.compression is not None:
        return "compression of gradients (`dataParallel.compression`) keeps what it left out"
    offload = training.offload
    if offload.parameters or offload.activations:
        return "`training.offload` keeps a part in the host's memory"
    return None


def _followed(config: Config) -> Config:
    """The config without what changes how tensors are made but not how large they are. Raises NotFollowedError."""
    if config.job.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER:
        raise NotFollowedError("with parameter servers a worker's memory depends on what it pulls at a time")
    if is_flushless(config.job.parallelism):
        raise NotFollowedError("PipeDream keeps versions of the parameters for microbatches under way")
    training = config.training
    changes: dict[str, Any] = {"compile": False, "model": training.model.model_copy(update={"meta_device": False})}
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


def _take_step(state: State, world: World, mode: FakeTensorMode, buckets: Buckets) -> tuple[int, int]:
    """Take a step. Return what its first forward pass adds, and the most that is there at once.

    The optimizer's state is there already, as it is in every step but the first.
    """
    batches = [_without_values(batch, mode) for batch in _microbatches(state, world)]
    meter = StorageMeter()
    meter.show([*state.module.parameters(), *state.module.buffers(), *_kept(state), *_tensors_of(batches)])
    meter.show(buckets.tensors)
    before, added = meter.live, list[int]()

    def forward_done() -> None:
        added.append(meter.peak - before)
        buckets.averaging = len(added) == len(batches)

    state.precision = WatchedPrecision(state.precision, forward_done)
    with mode, meter.counting():
        accumulate_gradients(state, batches, 1.0, 1.0, world.parts)
        clip_gradients(state, 1.0, world)
        state.precision.update(state.optimizer, None)
    return added[0], meter.peak


def _microbatches(state: State, world: World) -> list[Microbatch]:
    slots = state.sampler.microbatches(state.cursor, world.replica)[:MICROBATCHES]
    return [load_microbatch(state.task, state.data.training, slot, world.device.torch) for slot in slots]


def _without_values(microbatch: Microbatch, mode: FakeTensorMode) -> Microbatch:
    batch = map_tensors(mode.from_tensor, microbatch.batch)
    return replace(microbatch, batch=batch, weights=mode.from_tensor(microbatch.weights))


def _tensors_of(batches: list[Microbatch]) -> list[Tensor]:
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    for one in batches:
        map_tensors(find, one.batch)
    return found


def _held(state: State, mode: FakeTensorMode) -> tuple[int, int]:
    """Bytes of the gradients and of the optimizer's state, of every trained parameter."""
    with mode:
        for parameter in state.parameters:
            parameter.grad = torch.empty_like(parameter)
        with ValuesOfOne():
            state.optimizer.step()
        gradients = _bytes(one.grad for one in state.parameters if one.grad is not None)
        state.optimizer.zero_grad()
    return gradients, _bytes(_kept(state))


def _kept(state: State) -> list[Tensor]:
    values = (value for one in state.optimizer.state.values() for value in one.values())
    return [value for value in values if isinstance(value, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)
