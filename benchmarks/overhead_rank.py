"""A rank of trainer_overhead.py. It runs the trainer's loop or a session and a bare loop in turn, some steps each.

Run by benchmarks/ranks.py; arguments: blocks, which loop is ours (`trainer` or `session`), and which of the two is
built first (`ours` or `bare`). bare.json is the job of the bare loop. Rank 0 prints for each block the seconds of a
step, ours and the bare loop's.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim import AdamW

from benchmarks.bare_loop import BareLoop, mean_loss
from disttrain_api.jobconfig import JobConfig
from disttrain_session.session import session
from disttrain_trainer.build import build_state
from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.runtime.config import read_config
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.mesh import join_world
from disttrain_trainer.runtime.stop import StopRequest
from disttrain_trainer.start import open_checkpoints, start_metrics
from disttrain_trainer.strategies.base import Surroundings
from disttrain_trainer.strategies.synchronous import Synchronous
from disttrain_trainer.tasks.supervised import build_model, load_data

STEPS = 10
Step = Callable[[], None]


def seconds_per_step(step: Step) -> float:
    """Seconds per step of a block of steps, in which the trainer logs once."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begin) / STEPS


def trainer_loop() -> Callable[[], Step]:
    """Join the world; return what builds one step of the trainer's loop."""
    config, stop, reporter = read_config(), StopRequest(), Reporter(0, None)
    world = join_world(config, find_device(config.local_rank, config.local_world_size, threads_given=True))

    def build() -> Step:
        state = build_state(config, world)
        checkpoints, _ = open_checkpoints(config, world, state, reporter)

        def updated() -> None:
            if checkpoints is not None:
                checkpoints.collect()

        strategy = Synchronous(Surroundings(config, world, state, lambda: stop.requested, lambda: False, updated))
        metrics = start_metrics(config, world, state, reporter, strategy)
        results = strategy.run(sys.maxsize)
        return lambda: metrics.record(next(results))

    return build


def session_loop(job: JobConfig) -> Callable[[], Step]:
    """Join the world; return what builds one step of a loop of one's own in a session."""
    training = job.training
    opened = session(steps=training.steps, checkpoint_interval=training.steps).__enter__()

    def build() -> Step:
        model = build_model(training)
        model, optimizer = opened.prepare(
            model, AdamW(model.parameters(), lr=training.optimizer.learning_rate, fused=True)
        )
        batches = opened.loader(load_data(training).training, training.micro_batch_size)
        opened.restore(model=model, optimizer=optimizer)

        def step() -> None:
            inputs, targets = next(batches)
            loss = mean_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            opened.step(loss=loss)

        return step

    return build


def main() -> None:
    blocks, loop, first = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    job = JobConfig.model_validate_json(Path(os.environ["DISTTRAIN_CONFIG"]).with_name("bare.json").read_text())
    build = trainer_loop() if loop == "trainer" else session_loop(job)
    torch.set_num_threads(1)
    if first == "ours":
        ours, bare = build(), BareLoop(job).step
    else:
        bare, ours = BareLoop(job).step, build()
    # Both come first in turn.
    for block in range(blocks + 1):
        pair = [
            (name, seconds_per_step(step)) for name, step in [("ours", ours), ("bare", bare)][:: 1 - 2 * (block % 2)]
        ]
        if os.environ["RANK"] == "0" and block:
            print("block", dict(pair)["ours"], dict(pair)["bare"], flush=True)
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
