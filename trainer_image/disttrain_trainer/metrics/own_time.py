"""How long a rank works on a step by itself: without the time in which it waits for other ranks."""

from collections.abc import Sequence
from statistics import median_low

from torch import Tensor
from torch.autograd import Variable

from disttrain_trainer.metrics.results import Span, StepResult
from disttrain_trainer.parallel.comm_hooks.base import HookedSum
from disttrain_trainer.parallel.sharded import is_sharded
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.device import Device, Mark
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State


def computes_alone(config: Config, world: World, state: State) -> bool:
    """Return whether this rank waits for no other one within its forward and backward passes: replicas, and stages of a
    pipeline between their messages. Elsewhere the time of a pass is that of the slowest rank, on all of them."""
    parallelism = config.job.parallelism
    return (
        world.mesh.parts == world.mesh.replicate
        and world.mesh.tensor == 1
        and not is_sharded(config.training, world)
        and not parallelism.data_parallel.sync_batch_norm
        and (parallelism.devices_per_process or 1) == 1
        # It waits for the other ranks amid the backward pass.
        and not isinstance(state.gradient_sum, HookedSum)
    )


class PassClock:
    """Times the forward and backward passes of a step, up to where this rank waits for gradients of others."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begin: Mark = 0.0
        self._end: Mark | None = None

    def begin(self) -> None:
        """The passes begin."""
        self._begin, self._end = self._device.mark(), None

    def end_with(self, loss: Tensor) -> None:
        """They end when all gradients of this loss, the last one, are computed."""
        if loss.requires_grad:
            loss.register_hook(self._queue_mark)

    def take(self) -> Span | None:
        """Return when they began and ended; None: they have not ended."""
        return None if self._end is None else (self._begin, self._end)

    def _queue_mark(self, _: Tensor) -> None:
        # Autograd calls these in their order, and DDP adds its own, which waits, with its last bucket.
        Variable._execution_engine.queue_callback(self._mark)

    def _mark(self) -> None:
        self._end = self._device.mark()


def own_seconds(results: Sequence[StepResult], device: Device, computed: float | None = None) -> float:
    """Return the median over the steps, which the device has done, of this rank's own time. computed: seconds per step
    of its passes, where these are not in the results."""
    return median_low(
        device.seconds_of_both(one.loading_seconds, _computed(one, device) if computed is None else computed)
        for one in results
    )


def _computed(result: StepResult, device: Device) -> float:
    return 0.0 if result.passes is None else device.seconds(*result.passes)
