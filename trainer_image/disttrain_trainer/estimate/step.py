"""One step of a rank on tensors that have no memory: what it holds at most, computes and sends."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from disttrain_trainer.data.batches import Microbatch, load_microbatches, map_tensors
from disttrain_trainer.estimate.counter import Count, Message, WorkCounter, messages
from disttrain_trainer.estimate.imagined import Buckets, WatchedPrecision
from disttrain_trainer.estimate.meter import StorageMeter
from disttrain_trainer.estimate.served import Pushes, ServerTraffic, has_servers, updates
from disttrain_trainer.estimate.stages import Boundary, Bubble, ImaginedSchedule, bubble_of
from disttrain_trainer.parallel.local_sgd.replicas import Replicas
from disttrain_trainer.parallel.pipeline.pipeline import Pipeline
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State
from disttrain_trainer.step import accumulate_gradients, clip_gradients

PASSES = 2
"""The most microbatches of a step that are computed: the others are like the first, and need no more memory."""


@dataclass(frozen=True)
class StepWork:
    """What a rank does in a step."""

    flops: float
    """Floating-point operations of matrix products, convolutions and attention; what is computed anew counts again."""
    messages: list[Message]
    bubble: Bubble | None = None
    """None without a pipeline."""
    servers: ServerTraffic | None = None
    """None without parameter servers."""


@dataclass(frozen=True)
class Taken:
    """A step."""

    activations: int
    """Bytes that the forward pass adds to what is there before."""
    peak: int
    """The most bytes that are there at once."""
    in_host: int | None
    """How many of them are in the host's memory where ranks have GPUs."""
    work: StepWork


def take_step(
    state: State,
    world: World,
    config: Config,
    mode: FakeTensorMode,
    buckets: Buckets,
    counter: WorkCounter,
    boundaries: Sequence[Boundary],
) -> Taken:
    """Take a step. The optimizer's state is there already, as it is in every step but the first.

    boundaries: what the stages of a pipeline hand on.
    """
    passes = config.batch.accumulation
    computed = min(passes, PASSES)
    batches = [_without_values(batch, mode) for batch in _microbatches(state, world, computed * config.batch.pipeline)]
    meter = StorageMeter()
    meter.show([*state.module.parameters(), *state.module.buffers(), *kept_by(state), *_tensors_of(batches)])
    served = None
    with mode:
        buckets.begin()
        pushes = Pushes(state, world, config, counter) if has_servers(config) else None
        if pushes is not None:
            served = pushes.warm_up()
            meter.show(pushes.kept())
    meter.show(buckets.held())
    meter.show(state.replicas.kept if state.replicas is not None else ())
    added, counts = list[int](), list[Count]()

    def forward_done() -> None:
        added.append(meter.peak - before)
        buckets.averaging = len(added) == computed

    def pass_done() -> None:
        buckets.end_pass()
        counts.append(counter.take())

    state.precision = WatchedPrecision(state.precision, forward_done, pass_done)
    pipeline = state.pipeline
    counter.take()
    with mode, counter.counting(), meter.counting():
        if isinstance(pipeline, Pipeline):
            pipeline.passes = computed
            pipeline._schedule = ImaginedSchedule(pipeline, boundaries, counter, forward_done, pass_done)  # type: ignore[assignment]
        parts = 1 if state.replicas is not None else world.parts
        if pushes is not None:
            pushes.begin()
        total, before = counter.take(), meter.live
        pulling, meter.peak = meter.peak, meter.live
        with pushes.watching(computed) if pushes is not None else nullcontext():
            accumulate_gradients(state, batches, 1.0, 1.0, parts)
        if state.replicas is not None:
            _settle_gradients(state.replicas, counter)
        clip_gradients(state, 1.0, world)
        if updates(config):
            state.precision.update(state.optimizer, None)
        on_device = None
        if pushes is not None:
            on_device = pushes.on_device(meter.peak, meter.live)
            pushes.end()
    for count in (counter.take(), *counts):
        total = total.plus(count)
    total = total.plus(counts[0], passes - computed)
    pods = config.local_world_size
    sent = [*messages(total, world, pods), *_averagings(state, world, mode, counter, meter, pods)]
    bubble = bubble_of(pipeline) if isinstance(pipeline, Pipeline) else None
    peak = max(pulling, meter.peak)
    in_host = None if on_device is None else peak - on_device
    return Taken(added[0], peak, in_host, StepWork(total.flops, sent, bubble, served))


def _settle_gradients(replicas: Replicas, counter: WorkCounter) -> None:
    """As a step does that replicas take alone, and one of a warm-up before it, which holds more."""
    plan = replicas.plan
    if plan.sums_gradients(0):
        with counter.paused():
            replicas.settle_gradients(0)
    replicas.settle_gradients(min(plan.summed_steps, plan.steps - 1))


def _averagings(
    state: State, world: World, mode: FakeTensorMode, counter: WorkCounter, meter: StorageMeter, ranks_per_pod: int
) -> list[Message]:
    """What replicas that train alone send when they average: all of them at the end of a block, pods within it."""
    if state.replicas is None:
        return []
    plan, found = state.replicas.plan, list[Message]()
    state.optimizer.zero_grad()
    # The last averaging of a run makes the most of the average.
    for done, times in ((plan.steps, 1), (plan.summed_steps + plan.period, plan.pod_averagings)):
        if times:
            with mode, counter.counting(), meter.counting():
                state.replicas.synchronize(done)
            found += messages(Count().plus(counter.take(), times), world, ranks_per_pod, plan.block)
    return found


def _microbatches(state: State, world: World, count: int) -> list[Microbatch]:
    if not state.takes_samples:
        return []
    slots = state.sampler.microbatches(state.cursor, world.replica)[:count]
    return load_microbatches(state.task, state.data.training, slots, world.device.torch)


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


def kept_by(state: State) -> list[Tensor]:
    """Return the tensors of the optimizer's state."""
    values = (value for one in state.optimizer.state.values() for value in one.values())
    return [value for value in values if isinstance(value, Tensor)]
