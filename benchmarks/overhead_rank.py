"""A rank of trainer_overhead.py: the trainer's loop and a bare one in turn, some steps each, in the same processes.

Run by benchmarks/ranks.py; argument: blocks. Rank 0 prints for each block the seconds of a step, the trainer's and the
bare loop's.
"""

import os
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.bare_loop import BareLoop
from disttrain_trainer.build import build_state
from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.runtime.config import read_config
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.mesh import join_world
from disttrain_trainer.runtime.stop import StopRequest
from disttrain_trainer.start import open_checkpoints, start_metrics
from disttrain_trainer.strategies.base import Surroundings
from disttrain_trainer.strategies.synchronous import Synchronous

STEPS = 10


def seconds_per_step(step: Callable[[], None]) -> float:
    """Of a block of steps, in which the trainer logs once."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begin) / STEPS


def main() -> None:
    config, stop, reporter = read_config(), StopRequest(), Reporter(0, None)
    world = join_world(config, find_device(config.local_rank, config.local_world_size, threads_given=True))
    torch.set_num_threads(1)
    state = build_state(config, world)
    checkpoints = open_checkpoints(config, world, state, reporter)

    def updated() -> None:
        if checkpoints is not None:
            checkpoints.collect()

    strategy = Synchronous(Surroundings(config, world, state, lambda: stop.requested, updated))
    metrics = start_metrics(config, world, state, reporter, strategy)
    bare = BareLoop(config.job).step
    results = strategy.run(sys.maxsize)

    def ours() -> None:
        metrics.record(next(results))

    # Both come first in turn.
    for block in range(int(sys.argv[1]) + 1):
        pair = [
            (name, seconds_per_step(step)) for name, step in [("ours", ours), ("bare", bare)][:: 1 - 2 * (block % 2)]
        ]
        if world.first and block:
            print("block", dict(pair)["ours"], dict(pair)["bare"], flush=True)
    world.part()
    os._exit(0)


if __name__ == "__main__":
    main()
