"""How long a rank works on a step by itself: without the time in which it waits for other ranks."""

import time
from collections.abc import Sequence
from statistics import median_low

from torch import Tensor
from torch.autograd import Variable

from disttrain_api.parallelism import ContextParallelMethod
from disttrain_trainer.metrics.results import Passes, StepResult
from disttrain_trainer.metrics.waits import Waits, shares_buffers
from disttrain_trainer.parallel.comm_hooks.base import HookedSum
from disttrain_trainer.parallel.sharded import is_sharded
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.device import Device, Mark
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State

APART_SECONDS = 1.0
"""The least between two steps of shards whose passes are timed, but for the first one after a line of the log."""


def computes_alone(config: Config, world: World, state: State) -> bool:
    """Return whether this rank waits for no other one within its forward and backward passes: replicas, and stages of a
    pipeline between their messages. Elsewhere the time of a pass is that of the slowest rank, on all of them."""
    parallelism = config.job.parallelism
    return (
        world.mesh.parts == world.mesh.replicate
        and world.mesh.tensor == 1
        and not is_sharded(config.training, world)
        and not parallelism.data_parallel.sync_batch_norm
        and not shares_buffers(state.model)
        and _on_one_device(config, state)
    )


def waits_of(config: Config, world: World, state: State) -> Waits | None:
    """Return what marks where this rank waits within its passes. None where it waits for nobody there, and where that
    is not all that its time and another rank's differ by."""
    mesh, layout = world.mesh, config.job.parallelism
    between_layers = mesh.tensor > 1 or mesh.context > 1 or layout.data_parallel.sync_batch_norm
    if computes_alone(config, world, state) or mesh.pipeline > 1 or not _on_one_device(config, state):
        return None
    if between_layers and config.training.compile:
        # Compiled code waits by itself.
        return None
    if mesh.context > 1 and state.data.packed and layout.context_parallel_method is ContextParallelMethod.RING:
        # Where documents lie decides how much attention a rank of a ring computes.
        return None
    waits = Waits(state.model, world.device)
    return waits if waits.known else None


def blocks_of(config: Config, world: World) -> list[list[int]]:
    """Return the ranks that wait for each other within layers, where pods share that: none for replicas and shards."""
    mesh = world.mesh
    if config.job.parallelism.data_parallel.sync_batch_norm:
        axes: tuple[str, ...] = ("pipeline",)
    elif mesh.expert > 1:
        axes = ("pipeline", "replicate")
    elif mesh.tensor > 1 or mesh.context > 1:
        axes = ("pipeline", "replicate", "shard")
    else:
        return []
    return ranks_alike(world, axes)


def ranks_alike(world: World, axes: Sequence[str]) -> list[list[int]]:
    """Return the ranks of the world, those together that have the same index along each of these axes."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world.size):
        at = world.mesh.coordinates(rank)
        found.setdefault(tuple(at[axis] for axis in axes), []).append(rank)
    return list(found.values())


def _on_one_device(config: Config, state: State) -> bool:
    """Whether this process computes on one device, and the sum of gradients computes nothing in the backward pass."""
    # A hooked sum waits for the other ranks amid the backward pass.
    several = (config.job.parallelism.devices_per_process or 1) > 1
    return not several and not isinstance(state.gradient_sum, HookedSum)


class PassClock:
    """Times the forward and backward passes of a step, up to where this rank waits for gradients of others.

    waits: what marks where they wait before. That is many marks, so only some steps are timed.
    """

    def __init__(self, device: Device, waits: Waits | None = None) -> None:
        self._device, self._waits = device, waits
        self._begin: Mark = 0.0
        self._passes: Passes | None = None
        self._timed = False
        self._due = 0.0
        """Moment from which on another step is timed."""

    def begin(self) -> None:
        """The passes begin."""
        now = time.monotonic()
        self._passes, self._timed = None, self._waits is None or now >= self._due
        if not self._timed:
            return
        if self._waits is not None:
            self._due = now + APART_SECONDS
            self._waits.begin()
        self._begin = self._device.mark()

    def end_with(self, loss: Tensor) -> None:
        """They end when all gradients of this loss, the last one, are computed."""
        if loss.requires_grad and self._timed:
            loss.register_hook(self._queue_mark)

    def take(self) -> Passes | None:
        """Return when they began, waited and ended; None: they are not timed, or have not ended."""
        return self._passes

    def restart(self) -> None:
        """Time the next step: a line of the log is due."""
        self._due = 0.0

    def _queue_mark(self, _: Tensor) -> None:
        # Autograd calls these in their order, and DDP adds its own, which waits, with its last bucket.
        Variable._execution_engine.queue_callback(self._mark)

    def _mark(self) -> None:
        waits = () if self._waits is None else self._waits.end()
        self._passes = Passes((self._begin, self._device.mark()), waits)


def own_seconds(results: Sequence[StepResult], device: Device, computed: float | None = None) -> float:
    """Return the median over the steps, which the device has done, of this rank's own time. computed: seconds per step
    of its passes, where these are not in the results."""
    timed = [one for one in results if one.passes is not None] or results
    return median_low(
        device.seconds_of_both(one.loading_seconds, _computed(one.passes, device) if computed is None else computed)
        for one in timed
    )


def _computed(passes: Passes | None, device: Device) -> float:
    if passes is None:
        return 0.0
    return device.seconds(*passes.span) - sum(device.seconds(*wait) for wait in passes.waits)
