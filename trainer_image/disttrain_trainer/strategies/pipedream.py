"""Steps of a pipeline without flush: PipeDream and PipeDream-2BW. The flow itself: parallel/pipedream.

A run fills the pipeline, lets microbatches flow through it, and drains it. It ends where something needs the parameters
of exactly one step: an evaluation, a checkpoint, the end, a stop. Where that is decides which weights later gradients
are of, since a pipeline that was drained begins without older ones.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from disttrain_trainer.data.batches import Microbatch
from disttrain_trainer.metrics.results import StepResult, not_finite
from disttrain_trainer.optim.schedules import learning_rate
from disttrain_trainer.parallel.gradient_norm import GradientNorm
from disttrain_trainer.parallel.pipedream.flow import Flow
from disttrain_trainer.parallel.pipedream.step_agreement import GlobalStep
from disttrain_trainer.step import load_step, update_parameters
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
        )


class _Run:
    """Implements flow.Work between two drains; it counts steps from 0 there."""

    def __init__(self, around: Surroundings) -> None:
        self._around, self._state, self._training = around, around.state, around.config.training
        self.begin = self._state.step
        self.loading_seconds = 0.0
        self._cursor = self._state.cursor

    def load(self, step: int) -> list[Microbatch]:
        """Return the next step's microbatches; each is asked for once, in order."""
        begin = time.monotonic()
        microbatches = load_step(self._state, self._around.world, self._cursor)
        self._cursor = self._state.sampler.advance(self._cursor)
        self.loading_seconds = time.monotonic() - begin
        return microbatches

    def update(self, step: int) -> None:
        update_parameters(self._state, self.rate(step))
        self._around.updated()

    def must_end(self) -> bool:
        return self._around.must_end()

    def must_save(self) -> bool:
        return self._around.must_save()

    def logged(self, step: int) -> bool:
        number = self.begin + step + 1
        return number == self._training.steps or number % self._training.logging.interval == 0

    def is_finite(self, loss: float, norm: float) -> bool:
        return not_finite(loss, norm) is None

    def rate(self, step: int) -> float:
        return learning_rate(self._training, self.begin + step)
