"""What ranks do between two steps: evaluate, write a checkpoint, stop."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed.checkpoint.api import CheckpointException

from disttrain_api.report import MAX_SENTENCE
from disttrain_api.training import OnFailure
from disttrain_trainer.checkpoint import Checkpoints
from disttrain_trainer.config import Config
from disttrain_trainer.errors import EvaluationAborted, EvaluationFailed, Stopped, TrainerError
from disttrain_trainer.evaluate import evaluate
from disttrain_trainer.evaluation_mark import read_mark, write_mark
from disttrain_trainer.kept_replicas import agreed
from disttrain_trainer.mesh import World
from disttrain_trainer.randomness import keeping_random_state
from disttrain_trainer.report import Metrics, Reporter, say
from disttrain_trainer.state import State
from disttrain_trainer.stop import StopRequest


def do_what_is_due(
    config: Config, world: World, state: State, metrics: Metrics, checkpoints: Checkpoints | None, reporter: Reporter
) -> None:
    """Checkpoint and evaluation, where the steps that are done ask for them; an evaluation that fails costs no step."""
    if checkpoints is not None and save_is_due(config, state, checkpoints):
        save(state, checkpoints, metrics, reporter, wait=state.step == config.training.steps)
    if evaluation_is_due(config, state):
        run_evaluation(config, world, state, metrics, checkpoints, reporter)


def save_is_due(config: Config, state: State, checkpoints: Checkpoints) -> bool:
    """Return whether a checkpoint follows the step that is done."""
    return state.step == config.training.steps or checkpoints.due(state.step)


def evaluation_is_due(config: Config, state: State) -> bool:
    """Return whether an evaluation follows the step that is done."""
    interval = config.training.evaluation.interval
    return state.step == config.training.steps or (interval is not None and state.step % interval == 0)


def evaluate_restored(
    config: Config, world: World, state: State, metrics: Metrics, checkpoints: Checkpoints | None, reporter: Reporter
) -> None:
    """Evaluate what was restored, where an earlier attempt ended after this checkpoint and before its evaluation."""
    if checkpoints is None or not (state.step and save_is_due(config, state, checkpoints)):
        return
    if evaluation_is_due(config, state) and checkpoints.without_figures(state.step):
        run_evaluation(config, world, state, metrics, checkpoints, reporter)


def run_evaluation(
    config: Config, world: World, state: State, metrics: Metrics, checkpoints: Checkpoints | None, reporter: Reporter
) -> None:
    """Evaluate on held-out data, where there is some; report what was found, also in the checkpoint of this step.

    What is drawn meanwhile does not count, so that the checkpoint holds the random states that training goes on with.
    """
    former = world.from_first(lambda: read_mark(config), str | None)
    if former is not None:
        report_failure(world, reporter, f"no evaluation after step {state.step}: {former}")
        return
    try:
        with keeping_random_state(), agreed(state):
            figures = evaluate(state, world, config.training.evaluation.batch_size or config.batch.micro)
    except EvaluationFailed as error:
        if config.training.evaluation.on_failure is OnFailure.FAIL:
            raise
        if not error.on_every_rank:
            write_mark(config, str(error))
            raise EvaluationAborted(f"{error}; other ranks wait for it") from error.__cause__
        report_failure(world, reporter, str(error))
        return
    if figures:
        metrics.evaluated(state.step, figures)
        if checkpoints is not None:
            checkpoints.add_figures(state.step, figures)


def report_failure(world: World, reporter: Reporter, sentence: str) -> None:
    """Report that an evaluation has no figures, and no longer those of an earlier one."""
    reporter.update(metrics={}, evaluation_failure=sentence[:MAX_SENTENCE])
    say(world, sentence)


def save(state: State, checkpoints: Checkpoints, metrics: Metrics, reporter: Reporter, *, wait: bool) -> None:
    """Write a checkpoint, but never one of parameters that are not finite."""
    metrics.settle(state.step)
    checkpoints.save(state, wait)
    reporter.update(step=state.step, checkpoint=checkpoints.latest)


def must_end(stop: StopRequest, checkpoints: Checkpoints | None) -> bool:
    """Whether this rank was told to stop, or knows of a checkpoint that failed; the save in `stopped` raises why."""
    return stop.requested or (checkpoints is not None and checkpoints.failed)


@contextmanager
def completing(checkpoints: Checkpoints | None, reporter: Reporter) -> Iterator[None]:
    """What ends all ranks together, such as a loss that is not finite, waits for the checkpoint being written.

    So does an evaluation that fails on one rank: the others wait for it, and their saves go on.
    """
    try:
        yield
    except TrainerError as error:
        waits = error.on_every_rank or isinstance(error, EvaluationFailed | EvaluationAborted)
        if waits and checkpoints is not None:
            # Whatever becomes of the checkpoint, also where a rank is lost meanwhile: the error is why the rank ends.
            with suppress(Exception, CheckpointException):
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
    save(state, checkpoints, metrics, reporter, wait=True)
    return Stopped(f"SIGTERM: stopped after step {state.step}, its checkpoint is written")
