"""A real rank that counts the bytes it holds in a step after its first one, into a file beside its report."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain_trainer.estimate.imagined import WatchedPrecision
from disttrain_trainer.estimate.meter import StorageMeter
from disttrain_trainer.runtime.config import read_config
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.local import local_part
from disttrain_trainer.runtime.mesh import join_world
from disttrain_trainer.step import accumulate_gradients, clip_gradients, load_step, update_parameters
from disttrain_trainer.strategies.choose import build_job_state

TRIES = 3
"""Steps of which the one that holds the least counts."""


class Showing(TorchDispatchMode):
    """Shows the meter what another thread makes."""

    def __init__(self, meter: StorageMeter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._meter.__torch_dispatch__(func, types, args, kwargs)


def show_what_callbacks_make(meter: StorageMeter) -> None:
    """Callbacks of the backend's futures run in its threads, where no mode of this one counts."""
    original = torch._C.Future.then

    def then(future: Any, callback: Any) -> Any:
        def shown(done: Any) -> Any:
            with Showing(meter):
                return callback(done)

        return original(future, shown)

    torch._C.Future.then = then  # type: ignore[method-assign]


def main() -> None:
    config = read_config()
    device = find_device(config.local_rank, config.local_world_size, config.threads_given, 1)
    world = join_world(config, device)
    state = build_job_state(config, world)
    meter = StorageMeter()
    show_what_callbacks_make(meter)
    module, replicas, found = state.module, state.replicas, {}

    def step() -> None:
        batches = load_step(state, world, state.cursor)
        meter.show(tensor for batch in batches for tensor in batch.batch)
        before = meter.live
        state.precision = WatchedPrecision(
            state.precision, lambda: found.setdefault("activations", meter.peak - before) and None
        )
        with meter.counting():
            accumulate_gradients(state, batches, 1.0, 1.0, world.parts)
            if replicas is not None:
                replicas.settle_gradients(state.step)
            found["gradients"] = held(parameter.grad for parameter in state.parameters)
            norm = clip_gradients(state, 1.0, world)
            state.optimizer.step()
        update_parameters(state, 0.0, norm)
        if replicas is not None:
            with meter.counting():
                replicas.synchronize(state.step)

    def held(tensors) -> int:  # type: ignore[no-untyped-def]
        return sum(local_part(tensor).nbytes for tensor in tensors)

    def kept():  # type: ignore[no-untyped-def]
        return [value for one in state.optimizer.state.values() for value in one.values()]

    def counted() -> dict[str, int]:
        found.clear()
        meter.peak = meter.live
        # Replicas that train alone average at the end of a block.
        for _ in range(1 if replicas is None else replicas.plan.summed_steps + replicas.plan.period):
            step()
        return found | {"peak": meter.peak}

    meter.show([*module.parameters(), *module.buffers(), *(replicas.kept if replicas is not None else ())])
    step()
    # Where gloo lets go of messages late, a step holds more than it needs. Steps of a warm-up are not alike, though,
    # nor are those in which experts get other numbers of tokens.
    compression = config.job.parallelism.data_parallel.compression
    alike = not state.routing.layers and (compression is None or not compression.warmup_steps)
    alike = alike and (replicas is None or not replicas.plan.summed_steps)
    tries = [counted() for _ in range(TRIES if alike else 1)]
    found = min(tries, key=lambda one: one["peak"])
    found |= {"optimizer_state": held(kept())}
    found |= {"parameters": held(module.parameters()), "buffers": held(module.buffers())}
    Path(os.environ["HELD_BYTES"], f"rank-{config.rank}.json").write_text(json.dumps(found))
    world.leave()


if __name__ == "__main__":
    main()
