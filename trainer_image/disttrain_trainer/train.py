"""Train a model on this rank: `python -m disttrain_trainer.train`. The algorithm is `train`, below.

Comes in: job.json and the environment (config.py). Goes out: checkpoints on the storage, a report file per rank, a log,
and an exit code (disttrain_api.names.ExitCode).
"""

import gc
import os

from disttrain_trainer.stop import StopRequest

if __name__ == "__main__":
    # First of all: importing torch takes seconds in which SIGTERM may come.
    stop_request = StopRequest.on_sigterm()
    # What is imported stays: to search it for garbage takes a tenth of the start, and stops a step now and then.
    gc.disable()
    # Below errors torch's C++ warns of choices that are ours, not the user's (parallel/data_parallel.py).
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException

from disttrain_api.parallelism import DataParallelMode
from disttrain_trainer.between_steps import completing, do_what_is_due, evaluate_restored, must_end, stopped
from disttrain_trainer.checkpoint import Checkpoints
from disttrain_trainer.config import Config, read_config, report_place
from disttrain_trainer.cut_errors import explaining_cuts
from disttrain_trainer.data.batches import Microbatch
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.device import find_device
from disttrain_trainer.due import next_due
from disttrain_trainer.errors import Stopped, TrainerError, describe, describe_exit, no_room
from disttrain_trainer.mesh import World, join_world
from disttrain_trainer.parallel.data_parallel import has_buckets_to_form
from disttrain_trainer.parallel.pipedream.flow import Flow
from disttrain_trainer.parallel.pipedream.news import HeardWorld
from disttrain_trainer.preflight.check import check_network
from disttrain_trainer.profiling import profiling
from disttrain_trainer.randomness import random_state, restore_random_state
from disttrain_trainer.recipe import build_state
from disttrain_trainer.report import Metrics, Reporter, say
from disttrain_trainer.schedules import learning_rate
from disttrain_trainer.start import open_checkpoints, start_metrics
from disttrain_trainer.state import State
from disttrain_trainer.step import accumulate_gradients, clip_gradients, form_buckets, load_step, update_parameters
from disttrain_trainer.stretch import run_stretch


def train(config: Config, world: World, reporter: Reporter, stop: StopRequest) -> State:
    """Run the job to its last step and return the State it ends in. Raises TrainerError."""
    training = config.training
    if training.preflight:
        check_network(config.node, world)
    state = build_state(config, world)
    checkpoints = open_checkpoints(config, world, state, reporter)
    flow = isinstance(state.pipeline, Flow)
    # Ranks of a flow are in different steps: they do not meet to count.
    metrics = start_metrics(config, HeardWorld.like(world) if flow else world, state, reporter)
    reporter.follow(lambda: state.step)
    stop.loop_started(config.grace_seconds)
    if has_buckets_to_form(state.model) and state.step < training.steps:
        form_buckets(state, world)
    profiled = profiling(training.profiling, world, config.metrics_folder, state.step)
    cuts = explaining_cuts(config, world, state)
    with closing(metrics.sink), completing(checkpoints, reporter), profiled as profiler, cuts:
        evaluate_restored(config, world, state, metrics, checkpoints, reporter)
        while flow and state.step < training.steps:
            run_stretch(config, world, state, metrics, checkpoints, reporter, stop, profiler)
        upcoming: Upcoming | None = None
        while state.step < training.steps:
            upcoming = run_step(config, world, state, metrics, checkpoints, reporter, stop, upcoming)
            profiler.step()
    return state


class Upcoming(NamedTuple):
    """A step whose samples are loaded, and whose counts are being summed over all ranks."""

    microbatches: list[Microbatch]
    weight: float
    """Of this rank's microbatches."""
    samples: float
    """Of this rank's microbatches."""
    loading_seconds: float
    counts: Callable[[], list[float]]
    """Weight and samples of all ranks, and how many of these were told to stop."""
    before: dict[str, Any]
    """Random states before the samples were loaded, which may draw from them."""


def prepare_step(
    state: State, world: World, cursor: Cursor, stop: StopRequest, checkpoints: Checkpoints | None
) -> Upcoming:
    """Load this rank's part of the global batch at `cursor`."""
    begin, before = time.monotonic(), random_state()
    microbatches = load_step(state, world, cursor)
    loading = time.monotonic() - begin
    weight = sum(microbatch.weight for microbatch in microbatches)
    samples = sum(microbatch.samples for microbatch in microbatches)
    # One small gloo all-reduce: the weight that the mean loss needs, and whether some rank was told to stop.
    counts = world.sum_later(weight * world.speaks, samples * world.speaks, must_end(stop, checkpoints))
    return Upcoming(microbatches, weight, samples, loading, counts, before)


def run_step(
    config: Config, world: World, state: State, metrics: Metrics, checkpoints: Checkpoints | None, reporter: Reporter,
    stop: StopRequest, upcoming: Upcoming | None = None,
) -> Upcoming | None:  # fmt: skip
    """One global batch: gradients, clip, update; then whatever is due. Raises Stopped after SIGTERM.

    upcoming: the step, where the last one has prepared it. Returns the next one, unless something is due before it.
    """
    training = config.training
    step = upcoming or prepare_step(state, world, state.cursor, stop, checkpoints)
    microbatches, own_weight, own_samples = step.microbatches, step.weight, step.samples
    weight, samples, stopping = step.counts()
    if stopping:
        restore_random_state(step.before)
        raise stopped(state, checkpoints, metrics, reporter)

    rate = learning_rate(training, state.step)
    if state.gradient_sum is not None:
        state.gradient_sum.begin(state.step)
    if state.replicas is not None and state.replicas.alone(state.step):
        # The gradient is that of the mean over this replica's own samples; the loss is its part of the mean over all.
        loss = accumulate_gradients(state, microbatches, own_weight or 1.0, own_samples or 1.0, 1)
        loss = loss * (own_weight / (weight or 1.0))
    else:
        loss = accumulate_gradients(state, microbatches, weight or 1.0, samples or 1.0, world.replicas)
    if state.replicas is not None:
        state.replicas.settle_gradients(state.step)
    norm = clip_gradients(state, training.max_gradient_norm, world)
    following = None
    # What is due looks at the state between two steps, random numbers included, which data may use.
    if next_due(state.step, training, checkpoints is not None) > state.step + 1:
        following = prepare_step(state, world, state.sampler.advance(state.cursor), stop, checkpoints)
    update_parameters(state, rate, norm)
    if state.replicas is not None:
        state.replicas.meet(state.step)
    exchange = state.gradient_sum or state.replicas
    metrics.record(
        loss=loss * world.speaks, weight=weight, own_weight=own_weight, gradient_norm=norm, samples=samples, rate=rate,
        loading_seconds=step.loading_seconds, routing=state.routing.take_figures(samples or 1.0, len(microbatches)),
        gradient_bytes=exchange and exchange.bytes,
    )  # fmt: skip

    last = state.step == training.steps
    if checkpoints is not None and checkpoints.collect():
        reporter.update(checkpoint=checkpoints.latest)
    if last or state.step % training.logging.interval == 0:
        metrics.log(state.step)
    do_what_is_due(config, world, state, metrics, checkpoints, reporter)
    return following


def run(stop: StopRequest) -> int:
    """Everything from the environment to the exit code; no exception leaves."""
    reporter = Reporter(*report_place())
    stop.before_exit = lambda message: reporter.fail(describe(Stopped(message)))
    world: World | None = None
    try:
        config = read_config()
        devices = config.job.parallelism.devices_per_process or 1
        device = find_device(config.local_rank, config.local_world_size, config.threads_given, devices)
        if config.job.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER:
            # Not above: only such a job needs ZeroMQ.
            from disttrain_trainer.parameter_server.group import in_group
            from disttrain_trainer.parameter_server.work import work

            world = join_world(in_group(config), device)
            work(config, world, reporter, stop)
        else:
            world = join_world(config, device)
            if device.shares_gpu:
                say(world, "ranks share a GPU: what they send goes through gloo and the host's memory, which is slow")
            train(config, world, reporter, stop)
        reporter.update(done=True)
    # CheckpointException derives from BaseException; SystemExit is code of the user that leaves.
    except (Exception, CheckpointException, SystemExit) as error:
        return failed(error, reporter, world)
    world.part()
    return 0


def failed(error: BaseException, reporter: Reporter, world: World | None) -> int:
    """Say why this rank ends: on stderr, in the report, by the exit code."""
    if isinstance(error, SystemExit):
        told = describe_exit(error, reporter.step, reporter.report.total_steps)
    else:
        told = describe(error)
    if not isinstance(error, TrainerError) and not no_room(error):
        traceback.print_exception(error)
    print(f"disttrain: {told.reason}: {told.message}", file=sys.stderr, flush=True)
    with suppress(OSError):
        reporter.fail(told)
    if world is not None and isinstance(error, TrainerError) and error.on_every_rank:
        world.part()
    return told.exit_code


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    code = run(stop_request)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without tear-down: gloo's threads can abort a process that has done all its work.
    os._exit(code)
