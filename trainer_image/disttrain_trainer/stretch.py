"""Steps of a pipeline without flush (parallel/pipedream); a stretch of them lies between two moments when it drains.

It drains where something needs the parameters of exactly one step: an evaluation, a checkpoint, the end, a stop. Where
that is decides which weights later gradients are of, since a pipeline that was drained begins without older ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from disttrain_trainer.between_steps import do_what_is_due, must_end, stopped
from disttrain_trainer.checkpoint import Checkpoints
from disttrain_trainer.config import Config
from disttrain_trainer.data.batches import Microbatch
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.due import next_due
from disttrain_trainer.errors import NonFiniteLoss
from disttrain_trainer.mesh import World
from disttrain_trainer.parallel.pipedream.flow import Flow
from disttrain_trainer.parallel.pipedream.ledger import Told
from disttrain_trainer.profiling import Profiler
from disttrain_trainer.report import Metrics, Reporter
from disttrain_trainer.schedules import learning_rate
from disttrain_trainer.state import State
from disttrain_trainer.step import load_step, update_parameters
from disttrain_trainer.stop import StopRequest


def run_stretch(
    config: Config, world: World, state: State, metrics: Metrics, checkpoints: Checkpoints | None, reporter: Reporter,
    stop: StopRequest, profiler: Profiler,
) -> None:  # fmt: skip
    """Steps up to the next after which something is due, and that. Raises Stopped after SIGTERM, or NonFiniteLoss."""
    assert isinstance(state.pipeline, Flow)
    steps = next_due(state.step, config.training, checkpoints is not None) - state.step
    stretch = Stretch(config, world, state, metrics, checkpoints, reporter, stop, profiler)
    _, stopping = state.pipeline.run(steps, stretch)
    if stretch.failure is not None:
        raise stretch.failure
    do_what_is_due(config, world, state, metrics, checkpoints, reporter)
    if stopping and state.step < config.training.steps:
        raise stopped(state, checkpoints, metrics, reporter)


@dataclass
class Stretch:
    """What the flow asks for between two drains (flow.Work)."""

    config: Config
    world: World
    state: State
    metrics: Metrics
    checkpoints: Checkpoints | None
    reporter: Reporter
    stop: StopRequest
    profiler: Profiler
    failure: NonFiniteLoss | None = None

    def __post_init__(self) -> None:
        self._begin = self.state.step
        self._cursor: Cursor = self.state.cursor
        self._loading_seconds = 0.0

    def load(self, step: int) -> list[Microbatch]:
        """Of the next step; each is asked for once, in order."""
        begin = time.monotonic()
        microbatches = load_step(self.state, self.world, self._cursor)
        self._cursor = self.state.sampler.advance(self._cursor)
        self._loading_seconds = time.monotonic() - begin
        return microbatches

    def update(self, step: int) -> None:
        """One optimizer step of this rank, and what concerns this rank alone."""
        update_parameters(self.state, self._rate(step))
        self.profiler.step()
        if self.checkpoints is not None and self.checkpoints.collect():
            self.reporter.update(checkpoint=self.checkpoints.latest)

    def must_end(self) -> bool:
        return must_end(self.stop, self.checkpoints)

    def logged(self, step: int) -> bool:
        training, number = self.config.training, self._begin + step + 1
        return number == training.steps or number % training.logging.interval == 0

    def told(self, steps: Sequence[Told], figures: Mapping[str, float] | None) -> bool:
        """Record the steps, and log the last one where it is due. Returns False where a loss is not finite."""
        for one in steps:
            self.metrics.record(
                loss=torch.tensor(one.loss, dtype=torch.float64),
                weight=one.weight,
                own_weight=one.weight,
                gradient_norm=torch.tensor(one.gradient_norm, dtype=torch.float64),
                samples=one.samples,
                rate=self._rate(one.step),
                loading_seconds=self._loading_seconds,
                routing=None,
                gradient_bytes=None,
            )
        if figures is None or self.failure is not None:
            return self.failure is None
        self.metrics.figures = lambda: dict(figures)
        try:
            self.metrics.log(self._begin + steps[-1].step + 1)
        except NonFiniteLoss as failure:
            self.failure = failure
        return self.failure is None

    def _rate(self, step: int) -> float:
        return learning_rate(self.config.training, self._begin + step)
