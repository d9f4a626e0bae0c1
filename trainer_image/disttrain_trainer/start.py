"""What a loop starts with: the checkpoint that it resumes from, and its metrics."""

import torch

from disttrain_api.training import Checkpoint
from disttrain_trainer.checkpoint import Checkpoints
from disttrain_trainer.config import Config
from disttrain_trainer.mesh import World
from disttrain_trainer.parallel.pipeline.pipeline import Pipeline
from disttrain_trainer.randomness import keeping_random_state
from disttrain_trainer.report import METRICS_FILE, Metrics, Reporter, say
from disttrain_trainer.rotation import require_figure
from disttrain_trainer.sinks.open import open_sinks
from disttrain_trainer.sinks.sink import Sinks
from disttrain_trainer.state import State
from disttrain_trainer.weights import load_weights


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
