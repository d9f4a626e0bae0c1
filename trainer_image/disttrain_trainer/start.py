"""Start of a loop: the checkpoint or the survivor that it resumes from, and its metrics."""

from typing import Any

from disttrain_api.report import RankPhase
from disttrain_api.training import Checkpoint, ModelName
from disttrain_trainer.checkpoint.checkpoints import Checkpoints
from disttrain_trainer.checkpoint.retention import require_figure
from disttrain_trainer.checkpoint.weights import load_weights
from disttrain_trainer.metrics.own_time import blocks_of, ranks_alike
from disttrain_trainer.metrics.report import METRICS_FILE, Metrics, Reporter, log_first_rank
from disttrain_trainer.metrics.sinks.open import open_sinks
from disttrain_trainer.metrics.sinks.sink import Sinks
from disttrain_trainer.metrics.stragglers import Stragglers
from disttrain_trainer.roll_back import pass_over_marked, read_mark, step_back
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import keeping_random_state
from disttrain_trainer.state import State
from disttrain_trainer.strategies.base import Strategy
from disttrain_trainer.survivors.memory import PodMemory
from disttrain_trainer.survivors.resume import Resumed, resume


def open_checkpoints(
    config: Config, world: World, state: State, reporter: Reporter, memory: PodMemory | None = None
) -> tuple[Checkpoints | None, Resumed | None]:
    """The job's checkpoints, None without storage; and what was resumed from a rank that has survived, if anything was.
    Else the latest checkpoint is loaded."""
    reporter.update(total_steps=config.training.steps, phase=RankPhase.RESTORING)
    if config.checkpoint_folder is None:
        log_first_rank(world, "no storage: no checkpoints are written, a restart begins at step 0")
        resumed = resume(config, world, state, memory, lambda: None)
        _report_begin(reporter, state)
        return None, resumed
    settings = config.training.checkpoint or Checkpoint()
    require_figure(settings, state.task, state.data)
    checkpoints = Checkpoints.open(config.checkpoint_folder, config, world)
    mark = read_mark(config, world)
    step_back(mark, config, world, checkpoints)
    resumed = resume(config, world, state, memory, checkpoints.newest)
    latest = checkpoints.restore(state) if resumed is None else None
    pass_over_marked(mark, config, world, state, checkpoints.newest)
    if resumed is None:
        log_first_rank(
            world, f"resuming after step {latest.step} from {latest.path}" if latest else "no checkpoint yet: step 0"
        )
    if state.step >= config.training.steps:
        log_first_rank(
            world, f"nothing to do: {state.step} steps are done, and `training.steps` is {config.training.steps}"
        )
    fresh = latest is None and resumed is None
    if fresh and config.initial_weights is None and config.training.model.name is ModelName.TRANSFORMERS:
        log_first_rank(
            world,
            "the model begins with random numbers: `training.checkpoint.initialFrom` would read weights from files",
        )
    if fresh and config.initial_weights is not None:
        source = load_weights(state.module, config.initial_weights, world)
        if state.replicas is not None:
            # They keep the model from which they begin.
            state.replicas.set_out()
        log_first_rank(world, f"weights from {source}")
    _report_begin(reporter, state, checkpoint=latest, roll_backs=None if mark is None else mark.count)
    return checkpoints, resumed


def _report_begin(reporter: Reporter, state: State, **changes: Any) -> None:
    """Report where this life of the rank goes on, with all counts, so that none seems to begin anew."""
    skipped = None if state.guard is None else state.guard.skipped
    reporter.update(phase=RankPhase.STARTING, step=state.step, began=state.step, skipped_steps=skipped, **changes)


def start_metrics(config: Config, world: World, state: State, reporter: Reporter, strategy: Strategy) -> Metrics:
    """Metrics that begin to count now. config: of the job."""
    folder = config.metrics_folder
    with keeping_random_state():
        counts_tokens = state.task.counts_tokens(state.data)
    metrics = Metrics(
        reduction=strategy,
        device=world.device,
        ranks=config.world_size,
        writes=world.first,
        reporter=reporter,
        interval=config.training.logging.interval,
        last_step=config.training.steps,
        file=None if folder is None else folder / METRICS_FILE,
        sink=open_sinks(config.job, folder) if world.first else Sinks(),
        attempt=config.attempt,
        generation=config.generation,
        counts_tokens=counts_tokens,
        work=state.work,
        devices=config.world_size * (config.job.parallelism.devices_per_process or 1),
        peak_flops=world.device.peak_flops(config.training.precision),
        stragglers=_stragglers(config, world) if world.first else None,
    )
    if strategy.joined:
        metrics.recorded_before = world.from_first(metrics.last_logged, int)
    return metrics


def _stragglers(config: Config, world: World) -> Stragglers:
    """What compares the ranks of each stage with each other."""
    return Stragglers(ranks_alike(world, ["pipeline"]), blocks_of(config, world), config.local_world_size)


def start_callbacks(state: State, checkpoints: Checkpoints | None, resumed: Resumed | None) -> None:
    """Tell callbacks that an attempt begins, and give them their state.

    In this order, since what they make of the model in `on_start` says how state that is cut over ranks is loaded.
    """
    state.callbacks.call("on_start", state)
    if resumed is not None:
        resumed.restore_callbacks(state)
    elif checkpoints is not None:
        checkpoints.restore_callbacks(state)
