"""A rank that saves checkpoints in both ways, in turn: `python -m benchmarks.saving_rank REPEATS STEPS_BETWEEN`.

Rank 0 prints two numbers per repeat: seconds that training stood still for a save in the background, and for one that
it waits for. The slowest rank counts.
"""

import os
import sys
import time
from collections.abc import Callable

import torch

from disttrain_trainer.build import build_state
from disttrain_trainer.checkpoint.checkpoints import Checkpoints
from disttrain_trainer.runtime.config import read_config
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.mesh import World, join_world
from disttrain_trainer.state import State
from disttrain_trainer.step import accumulate_gradients, load_step, update_parameters


def main() -> None:
    repeats, between = (int(argument) for argument in sys.argv[1:])
    config = read_config()
    device = find_device(config.local_rank, config.local_world_size, config.threads_given, 1)
    world = join_world(config, device)
    state = build_state(config, world)
    assert config.checkpoint_folder is not None
    checkpoints = Checkpoints.open(config.checkpoint_folder, config, world)
    step(state, world, between)
    # The first of each makes buffers and folders.
    for number in range(1 + repeats):
        stall = slowest(world, lambda: checkpoints.save(state, wait=False))
        step(state, world, between)
        checkpoints.settle()
        step(state, world, 1)
        blocking = slowest(world, lambda: checkpoints.save(state, wait=True))
        step(state, world, 1)
        if world.first and number:
            print(stall, blocking, flush=True)
    world.leave()
    sys.stdout.flush()
    os._exit(0)


def step(state: State, world: World, times: int) -> None:
    """Train, so that every checkpoint is of another step."""
    for _ in range(times):
        accumulate_gradients(state, load_step(state, world, state.cursor), 1.0, 1.0, world.replicas)
        update_parameters(state, 1e-4)


def slowest(world: World, save: Callable[[], None]) -> float:
    """Seconds that the slowest rank takes."""
    world.sum(0)
    begin = time.monotonic()
    save()
    return float(world.max_tensor(torch.tensor(time.monotonic() - begin)))


if __name__ == "__main__":
    main()
