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
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException

from disttrain_api.parallelism import DataParallelMode
from disttrain_api.training import Checkpoint
from disttrain_trainer.checkpoint import Checkpoints
from disttrain_trainer.config import Config, read_config, report_place
from disttrain_trainer.cut_errors import explaining_cuts
from disttrain_trainer.data.batches import Microbatch, load_microbatch
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.device import find_device
from disttrain_trainer.due import next_due
from disttrain_trainer.errors import Stopped, TrainerError, describe
from disttrain_trainer.evaluate import evaluate
from disttrain_trainer.kept_replicas import agreed
from disttrain_trainer.mesh import World, join_world
from disttrain_trainer.parallel.activations import offload
from disttrain_trainer.parallel.data_parallel import has_buckets_to_form, synchronize_gradients
from disttrain_trainer.parallel.gradient_norm import clip, total_norm
from disttrain_trainer.parallel.pipedream.flow import Flow
from disttrain_trainer.parallel.pipedream.news import HeardWorld
from disttrain_trainer.parallel.pipeline.pipeline import Pipeline
from disttrain_trainer.parallel.tensor import settle_gradients
from disttrain_trainer.preflight.check import check_network
from disttrain_trainer.profiling import profiling
from disttrain_trainer.randomness import keeping_random_state, random_state, restore_random_state
from disttrain_trainer.recipe import build_state
from disttrain_trainer.report import METRICS_FILE, Metrics, Reporter, say
from disttrain_trainer.rotation import require_figure
from disttrain_trainer.schedules import learning_rate
from disttrain_trainer.sinks.open import open_sinks
from disttrain_trainer.sinks.sink import Sinks
from disttrain_trainer.state import State
from disttrain_trainer.weights import load_weights


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
    stop.loop_started(config.grace_seconds)
    if has_buckets_to_form(state.model) and state.step < training.steps:
        form_buckets(state, world)
    profiled = profiling(training.profiling, world, config.metrics_folder, state.step)
    cuts = explaining_cuts(config, world, state)
    with closing(metrics.sink), completing(checkpoints, reporter), profiled as profiler, cuts:
        while flow and state.step < training.steps:
            # Not above: it is made of this module's steps.
            from disttrain_trainer.stretch import run_stretch

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


def do_what_is_due(
    config: Config, world: World, state: State, metrics: Metrics, checkpoints: Checkpoints | None, reporter: Reporter
) -> None:
    """Evaluation and checkpoint, where the steps that are done ask for them."""
    training = config.training
    last = state.step == training.steps
    figures: dict[str, float] = {}
    if last or (training.evaluation.interval and state.step % training.evaluation.interval == 0):
        figures = run_evaluation(state, config, world, metrics)
    if checkpoints is not None and (last or checkpoints.due(state.step)):
        save(state, checkpoints, metrics, reporter, figures, wait=last)


def load_step(state: State, world: World, cursor: Cursor, first_replica: int = 0) -> list[Microbatch]:
    """This rank's microbatches of the global batch at `cursor`; none where it uses none, in the middle of a pipeline.

    first_replica: of the job's, the one that the first replica of this world is.
    """
    if not state.takes_samples:
        return []
    slots = state.sampler.microbatches(cursor, first_replica + world.replica)
    return [load_microbatch(state.data.training, slot, world.device.torch) for slot in slots]


def form_buckets(state: State, world: World) -> None:
    """Two passes over one microbatch that leave nothing behind but what DDP learns from them.

    In the first it counts the uses of each parameter, in the second it sees the order in which gradients come. Else the
    first step after a resume would sum gradients in another order than the same step of a run that goes on.
    """
    buffers = [buffer.clone() for buffer in state.module.buffers()]
    with keeping_random_state():
        microbatch = load_step(state, world, state.cursor)[:1]
        for _ in range(2):
            accumulate_gradients(state, microbatch, 1.0, 1.0, world.replicas)
            state.optimizer.zero_grad()
    state.routing.take_figures(1.0, 2)
    with torch.no_grad():
        for buffer, before in zip(state.module.buffers(), buffers, strict=True):
            buffer.copy_(before)


def accumulate_gradients(
    state: State, microbatches: list[Microbatch], weight: float, samples: float, replicas: int
) -> torch.Tensor:
    """Gradient of the mean loss over all samples (tokens) of all replicas and microbatches; this rank's part of it.

    `weight` is the number of those samples (tokens), `samples` that of samples: auxiliary losses of experts are means
    over these. Replicas are averaged where the losses are summed, hence x replicas.
    """
    state.routing.gradient = state.precision.scaled_one() * (replicas / samples)
    if isinstance(state.pipeline, Pipeline):
        return state.pipeline.accumulate_gradients(microbatches, weight, replicas)
    total = torch.zeros((), device=state.precision.device)
    for index, batch in enumerate(microbatches):
        last = index == len(microbatches) - 1
        with synchronize_gradients(state.model, now=last):
            with (
                state.precision.autocast(),
                offload(state.precision.device, state.offload_activations),
                state.routing.microbatch(batch.weights),
            ):
                loss = state.loss.sum(state.model(batch.inputs), batch.targets, batch.weights) / weight
            state.precision.backward(loss * replicas)
        total = total + loss.detach()
    return total


def clip_gradients(state: State, maximum: float | None, world: World) -> torch.Tensor:
    """2-norm of the gradient before clipping; above `maximum` it is scaled down to it."""
    settle_gradients(state.parameters)
    state.precision.unscale(state.parameters)
    copies = state.pipeline.copies if isinstance(state.pipeline, Pipeline) else None
    norm = total_norm(state.parameters, world, copies)
    if maximum is not None:
        clip(state.parameters, norm, maximum)
    return norm


def update_parameters(state: State, rate: float, norm: torch.Tensor | None = None) -> None:
    """One optimizer step; the state then stands after it. norm: 2-norm of the gradient, which FP16 asks for."""
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    state.precision.update(state.optimizer, norm)
    state.optimizer.zero_grad()
    state.cursor = state.sampler.advance(state.cursor)
    state.step += 1


def run_evaluation(state: State, config: Config, world: World, metrics: Metrics) -> dict[str, float]:
    """Evaluate on held-out data, where there is some, report and return what was found."""
    with agreed(state):
        figures = evaluate(state, world, config.training.evaluation.batch_size or config.batch.micro)
    if figures:
        metrics.evaluated(state.step, figures)
    return figures


def save(
    state: State, checkpoints: Checkpoints, metrics: Metrics, reporter: Reporter, figures: dict[str, float], *,
    wait: bool,
) -> None:  # fmt: skip
    """Write a checkpoint, but never one of parameters that are not finite."""
    metrics.settle(state.step)
    checkpoints.save(state, wait, figures)
    reporter.update(step=state.step, checkpoint=checkpoints.latest)


def must_end(stop: StopRequest, checkpoints: Checkpoints | None) -> bool:
    """Whether this rank was told to stop, or knows of a checkpoint that failed; the save in `stopped` raises why."""
    return stop.requested or (checkpoints is not None and checkpoints.failed)


@contextmanager
def completing(checkpoints: Checkpoints | None, reporter: Reporter) -> Iterator[None]:
    """What ends all ranks together, such as a loss that is not finite, waits for the checkpoint being written."""
    try:
        yield
    except TrainerError as error:
        if error.on_every_rank and checkpoints is not None:
            with suppress(TrainerError, CheckpointException):
                checkpoints.settle()
                reporter.update(checkpoint=checkpoints.latest)
        raise


def stopped(state: State, checkpoints: Checkpoints | None, metrics: Metrics, reporter: Reporter) -> Stopped:
    """Save where there is storage; what to raise after SIGTERM."""
    if checkpoints is None:
        return Stopped(f"SIGTERM: stopped after step {state.step}; without `storage` the next start is at step 0")
    if state.step == 0:
        # There is nothing to keep, and torch would save an optimizer that has made a step already.
        return Stopped("SIGTERM: stopped before the first step was done; the next start is at step 0")
    save(state, checkpoints, metrics, reporter, {}, wait=True)
    return Stopped(f"SIGTERM: stopped after step {state.step}, its checkpoint is written")


def open_checkpoints(config: Config, world: World, state: State, reporter: Reporter) -> Checkpoints | None:
    """The job's checkpoints, the latest of them loaded; None without storage."""
    if config.checkpoint_folder is None:
        say(world, "no storage: no checkpoints are written, a restart begins at step 0")
        reporter.update(total_steps=config.training.steps)
        return None
    settings = config.training.checkpoint or Checkpoint()
    require_figure(settings, state.data)
    checkpoints = Checkpoints.open(config.checkpoint_folder, config, world)
    latest = checkpoints.restore(state)
    say(world, f"resuming after step {latest.step} from {latest.path}" if latest else "no checkpoint yet: step 0")
    if latest is None and config.initial_weights is not None:
        source = load_weights(state.module, config.initial_weights, world)
        say(world, f"weights from {source}")
    reporter.update(total_steps=config.training.steps, step=state.step, checkpoint=latest)
    return checkpoints


def start_metrics(config: Config, world: World, state: State, reporter: Reporter) -> Metrics:
    """Metrics that begin to count now."""
    folder = config.metrics_folder
    with keeping_random_state():
        target = state.data.training[0][1]
    return Metrics(
        world=world,
        reporter=reporter,
        file=None if folder is None else folder / METRICS_FILE,
        sink=open_sinks(config.job, folder) if world.first else Sinks(),
        attempt=config.attempt,
        # A class per position of a sequence; anything else is counted in samples.
        counts_tokens=torch.is_tensor(target) and target.dim() == 1 and not target.is_floating_point(),
        work=state.work,
        devices=world.size * (config.job.parallelism.devices_per_process or 1),
        peak_flops=world.device.peak_flops(config.training.precision),
        check_gradients=not state.precision.scales,
        own_norms=state.replicas is not None,
        figures=state.pipeline.figures if isinstance(state.pipeline, Pipeline) else dict,
    )


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
            # Not above: it is made of this module's steps.
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
    # CheckpointException derives from BaseException.
    except (Exception, CheckpointException) as error:
        return failed(error, reporter, world)
    world.part()
    return 0


def failed(error: BaseException, reporter: Reporter, world: World | None) -> int:
    """Say why this rank ends: on stderr, in the report, by the exit code."""
    told = describe(error)
    if not isinstance(error, TrainerError):
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
