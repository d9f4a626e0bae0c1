"""What ranks do between two steps: evaluate, write a checkpoint, stop."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed.checkpoint.api import CheckpointException

from disttrain_trainer.checkpoint import Checkpoints
from disttrain_trainer.config import Config
from disttrain_trainer.errors import Stopped, TrainerError
from disttrain_trainer.evaluate import evaluate
from disttrain_trainer.kept_replicas import agreed
from disttrain_trainer.mesh import World
from disttrain_trainer.report import Metrics, Reporter
from disttrain_trainer.state import State
from disttrain_trainer.stop import StopRequest


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
