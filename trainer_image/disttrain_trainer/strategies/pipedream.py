"""Steps of a pipeline without flush: PipeDream and PipeDream-2BW. The flow itself: parallel/pipedream.

A run fills the pipeline, lets microbatches flow through it, and drains it. It ends where something needs the parameters
of exactly one step: an evaluation, a checkpoint, the end, a stop. Where that is decides which weights later gradients
are of, since a pipeline that was drained begins without older ones.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy

import torch

from disttrain_trainer.data.batches import Microbatch
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.metrics.results import StepResult, not_finite
from disttrain_trainer.optim.schedules import learning_rate
from disttrain_trainer.parallel.gradient_norm import GradientNorm
from disttrain_trainer.parallel.pipedream.flow import Flow
from disttrain_trainer.parallel.pipedream.step_agreement import GlobalStep
from disttrain_trainer.runtime.errors import NonFiniteLoss
from disttrain_trainer.step import load_step, skip_update, update_parameters
from disttrain_trainer.strategies.base import Surroundings


class PipeDream:
    """See `Strategy`. Results come some steps late, summed over all ranks: these never meet."""

    joined = False
    own_seconds: Sequence[float] = ()
    """Ranks are in different steps, each at the pace of its neighbours."""

    def __init__(self, around: Surroundings) -> None:
        assert isinstance(around.state.pipeline, Flow)
        self.stopping = self.saving = False
        self._around, self._state, self._flow = around, around.state, around.state.pipeline
        self._figures: Mapping[str, float] = {}

    def run(self, until: int) -> Iterator[StepResult]:
        run = _Run(self._around)
        for batch in self._flow.run(until - self._state.step, run):
            self._figures = batch.figures
            for one in batch.steps:
                yield self._result(one, run)
        self.stopping, self.saving = self._flow.stopping, self._flow.saving

    def consistent(self, *, optimizer: bool) -> AbstractContextManager[None]:
        """Return a context that does nothing: the pipeline is drained."""
        return nullcontext()

    def totals(self, results: Sequence[StepResult]) -> list[tuple[float, float]]:
        return [(float(one.loss), float(one.gradient_norm())) for one in results]

    def figures(self, results: Sequence[StepResult]) -> dict[str, float]:
        return dict(self._figures)

    def _result(self, global_step: GlobalStep, run: "_Run") -> StepResult:
        """Raises NonFiniteLoss, on all ranks, where with this step too many in a row are skipped."""
        guard = self._state.guard
        if run.error is not None and run.error.step == run.begin + global_step.step + 1:
            raise run.error
        norm = torch.tensor(global_step.gradient_norm, dtype=torch.float64)
        return StepResult(
            step=run.begin + global_step.step + 1,
            loss=torch.tensor(global_step.loss, dtype=torch.float64),
            weight=global_step.weight,
            own_weight=global_step.weight,
            gradient_norm=GradientNorm(norm),
            samples=global_step.samples,
            rate=run.rate(global_step.step),
            loading_seconds=run.loading_seconds,
            skipped=global_step.skipped,
            skipped_steps=None if guard is None else guard.skipped,
        )


class _Run:
    """Implements flow.Work between two drains; it counts steps from 0 there."""

    def __init__(self, around: Surroundings) -> None:
        self._around, self._state, self._training = around, around.state, around.config.training
        self.begin = self._state.step
        self.loading_seconds = 0.0
        self._begun = self._cursor = self._state.cursor
        self.judges = self._state.guard is not None
        self.error: NonFiniteLoss | None = None
        """Why the attempt ends, with the step after which it does."""
        # The last stage judges before others know of the step. What all know is in the state, alike on all ranks.
        self._ahead = deepcopy(self._state.guard)

    def load(self, step: int) -> list[Microbatch]:
        """Return the next step's microbatches; each is asked for once, in order."""
        begin = time.monotonic()
        microbatches = load_step(self._state, self._around.world, self._cursor)
        self._cursor = self._state.sampler.advance(self._cursor)
        self.loading_seconds = time.monotonic() - begin
        return microbatches

    def is_used(self, loss: float) -> bool:
        # The norm of the whole gradient is not known yet; a stage whose part is not finite says so by itself.
        return self._ahead is None or self._ahead.judge(loss, 0.0) is None

    def update(self, step: int) -> None:
        update_parameters(self._state, self.rate(step))
        self._around.updated()

    def skip(self, step: int) -> None:
        skip_update(self._state)
        self._around.updated()

    def must_end(self) -> bool:
        return self._around.must_end()

    def must_save(self) -> bool:
        return self._around.must_save()

    def logged(self, step: int) -> bool:
        number = self.begin + step + 1
        return number == self._training.steps or number % self._training.logging.interval == 0

    def may_go_on(self, step: GlobalStep) -> bool:
        guard, number = self._state.guard, self.begin + step.step + 1
        if guard is None:
            return not_finite(step.loss, step.gradient_norm) is None
        reason = guard.learn(step.loss, step.gradient_norm, skipped=step.skipped)
        if reason is None:
            return True
        log_first_rank(self._around.world, f"step {number} is skipped: its {reason}")
        try:
            guard.count(number, reason)
        except NonFiniteLoss as error:
            behind = self._begun
            for _ in range(step.step + 1):
                behind = self._state.sampler.advance(behind)
            error.behind = (behind.epoch, behind.position)
            self.error = error
        return self.error is None

    def rate(self, step: int) -> float:
        return learning_rate(self._training, self.begin + step)
