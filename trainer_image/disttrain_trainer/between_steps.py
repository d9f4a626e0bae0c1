"""Actions of the ranks between two steps: evaluate, write a checkpoint, stop."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

from torch.distributed.checkpoint.api import CheckpointException

from disttrain_api.report import MAX_SENTENCE, RankPhase
from disttrain_api.training import Checkpoint, OnFailure
from disttrain_trainer.checkpoint.checkpoints import Checkpoints
from disttrain_trainer.checkpoint.retention import require_judged
from disttrain_trainer.evaluate import evaluate
from disttrain_trainer.evaluation_mark import read_mark, write_mark
from disttrain_trainer.intervals import next_due
from disttrain_trainer.metrics.report import Metrics, Reporter, log_first_rank
from disttrain_trainer.runtime.checkpoint_request import CheckpointRequest
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import EvaluationAborted, EvaluationFailed, Stopped, TrainerError
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import keeping_random_state
from disttrain_trainer.samples import write_samples
from disttrain_trainer.state import State
from disttrain_trainer.strategies.base import Strategy


@dataclass(frozen=True)
class BetweenSteps:
    """Checkpoints and evaluations of the parameters of exactly one step (Strategy.consistent)."""

    config: Config
    world: World
    state: State
    strategy: Strategy
    metrics: Metrics
    checkpoints: Checkpoints | None
    request: CheckpointRequest
    reporter: Reporter

    @property
    def next_due(self) -> int:
        """The next step that an evaluation, a checkpoint or the end follows."""
        return next_due(self.state.step, self.config.training, self.checkpoints is not None)

    def do_what_is_due(self, until: int) -> None:
        """Save and evaluate after a run that was to take steps up to `until`, as the steps that are done ask for it.
        Also save where somebody has asked for it. Raises Stopped, with a checkpoint, where the ranks have agreed to
        stop.

        The checkpoint comes first: an evaluation that fails costs no step.
        """
        stopping = self.strategy.stopping and self.state.step < self.config.training.steps
        saving = self.checkpoints is not None and (stopping or self.strategy.saving or self._save_is_due)
        with self.strategy.consistent(optimizer=saving):
            if self.checkpoints is not None and self.strategy.saving:
                self.request.answered()
                self._save(self.checkpoints, wait=False)
            # A run that ends before its first step comes after what was due there.
            if not (self.strategy.stopping or self.strategy.saving) or self.state.step == until:
                if self.checkpoints is not None and self._save_is_due:
                    self._save(self.checkpoints, wait=self._at_the_end)
                if self._evaluation_is_due:
                    self._evaluate()
            if stopping:
                raise self._stopped()

    def evaluate_restored(self) -> None:
        """Evaluate what was restored, where an earlier attempt ended between this checkpoint and its evaluation; else
        tell the callbacks what that found."""
        if self.checkpoints is None or not self.state.step or not (self._save_is_due and self._evaluation_is_due):
            return
        with self.strategy.consistent(optimizer=False):
            figures = self.checkpoints.figures(self.state.step)
            if figures:
                # The checkpoint was taken before the evaluation, and so was what it holds of the callbacks.
                self.state.callbacks.call("on_evaluation", self.state, figures)
            elif figures is not None:
                self._evaluate()

    @property
    def _at_the_end(self) -> bool:
        return self.state.step == self.config.training.steps

    @property
    def _save_is_due(self) -> bool:
        """Whether a checkpoint follows the step that is done, where some are written."""
        return self._at_the_end or (self.checkpoints is not None and self.checkpoints.due(self.state.step))

    @property
    def _evaluation_is_due(self) -> bool:
        """Whether an evaluation follows the step that is done."""
        interval = self.config.training.evaluation.interval
        return self._at_the_end or (interval is not None and self.state.step % interval == 0)

    def _evaluate(self) -> None:
        """Evaluate on held-out data, where there is some; report what was found, also in the checkpoint of this step.

        What is drawn meanwhile does not count, so that training goes on with the random states of the checkpoint.
        """
        state, evaluation = self.state, self.config.training.evaluation
        former = self.world.from_first(lambda: read_mark(self.config), str | None)
        if former is not None:
            self._report_failure(f"no evaluation after step {state.step}: {former}")
            return
        try:
            evaluating = state.callbacks.evaluating(state)
            with self.reporter.during(RankPhase.EVALUATING), keeping_random_state(), evaluating:
                batch_size, moved = evaluation.batch_size or self.config.batch.micro, self.reporter.times.moved
                figures = evaluate(state, self.world, batch_size, moved)
                texts = write_samples(state, self.world, batch_size, self.config.training.seed, moved)
        except EvaluationFailed as error:
            if evaluation.on_failure is OnFailure.FAIL:
                raise
            if not error.on_every_rank:
                write_mark(self.config, str(error))
                raise EvaluationAborted(f"{error}; other ranks wait for it") from error.__cause__
            self._report_failure(str(error))
            return
        if state.data.prompts is not None:
            self.metrics.sampled(state.step, state.data.prompts.config.prompts, texts)
        if figures:
            self.metrics.evaluated(state.step, figures)
            if self.checkpoints is not None:
                self.checkpoints.add_figures(state.step, figures)
                require_judged(self.config.training.checkpoint or Checkpoint(), figures)
            state.callbacks.call("on_evaluation", state, figures)

    def _report_failure(self, sentence: str) -> None:
        """Report that an evaluation has no figures, and no longer those of an earlier one."""
        self.reporter.update(metrics={}, evaluation_failure=sentence[:MAX_SENTENCE])
        log_first_rank(self.world, sentence)

    def _save(self, checkpoints: Checkpoints, *, wait: bool) -> None:
        """Write a checkpoint, but never one of parameters that are not finite."""
        self.metrics.settle()
        # Also for the one before it.
        waits = wait or not self.config.saves_in_background or checkpoints.writing
        with self.reporter.during(RankPhase.SAVING) if waits else nullcontext():
            checkpoints.save(self.state, wait)
        self.reporter.update(step=self.state.step, checkpoint=checkpoints.latest)

    def _stopped(self) -> Stopped:
        """Save where there is storage; return what to raise after SIGTERM."""
        step = self.state.step
        if self.checkpoints is None:
            return Stopped(f"SIGTERM: stopped after step {step}; without `storage` the next start is at step 0")
        if step == 0:
            # There is nothing to keep, and torch would save an optimizer that has made a step already.
            return Stopped("SIGTERM: stopped before the first step was done; the next start is at step 0")
        self._save(self.checkpoints, wait=True)
        return Stopped(f"SIGTERM: stopped after step {step}, its checkpoint is written")


@contextmanager
def completing(checkpoints: Checkpoints | None, reporter: Reporter) -> Iterator[None]:
    """Complete the checkpoint being written before an error that ends all ranks together, such as a loss that is not
    finite.

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
