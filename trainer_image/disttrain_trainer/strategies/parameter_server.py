"""Steps of a job with parameter servers: workers get parts of them as tasks (parameter_server/server/scheduler.py).

The first worker leads: it takes the job's steps as any other layout does, in the loop, evaluates and writes the
checkpoints. The others follow: they take tasks until there are no more, and have no part in what is due between steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from disttrain_api.training import Checkpoint
from disttrain_trainer.checkpoint.storage import newest_seen
from disttrain_trainer.checkpoint.weights import load_weights
from disttrain_trainer.checks.cut_errors import explaining_cuts
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.metrics.profiling import profiling
from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.metrics.results import StepResult, SumOverRanks
from disttrain_trainer.optim.schedules import learning_rate
from disttrain_trainer.parallel.gradient_norm import GradientNorm
from disttrain_trainer.parameter_server.protocol.tasks import CompleteStep
from disttrain_trainer.parameter_server.worker.client import Answer, Welcome
from disttrain_trainer.parameter_server.worker.embedding_tables import let_go, tables_of
from disttrain_trainer.parameter_server.worker.metrics import CounterMetrics
from disttrain_trainer.parameter_server.worker.optimizer_state import gather_states, scatter_states
from disttrain_trainer.parameter_server.worker.pulling import Pulled
from disttrain_trainer.parameter_server.worker.worker import Worker, build_worker_state, connect
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import Stopped
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.stop import StopRequest
from disttrain_trainer.state import State
from disttrain_trainer.strategies.base import Surroundings


@contextmanager
def leading(around: Surroundings) -> Iterator[Leader]:
    """Meet the servers, and tell them that the job's work is done when it is, or stopped and kept."""
    worker = connect(around.config, around.world, around.state, around.must_end)
    try:
        leader = Leader(around, worker, worker.servers.hello(around.state.data.size or 0))
        try:
            yield leader
        except Stopped:
            worker.servers.finish()
            raise
        # A job may have been complete when it was started again: the other workers are to hear of it.
        leader.start(around.state.step)
        worker.servers.finish()
    finally:
        worker.servers.close()


class Leader(SumOverRanks):
    """See `Strategy`. Results come when a step's last part has; figures are those of this worker and of the servers.

    Servers stop at steps that are known before: nobody can ask for a checkpoint in between.
    """

    saving = False

    def __init__(self, around: Surroundings, worker: Worker, welcome: Welcome) -> None:
        pipeline, rates = around.state.pipeline, CounterMetrics(worker.servers)
        layout = dict if pipeline is None else pipeline.figures
        super().__init__(around.world, of_layout=lambda: {**layout(), **rates.figures()})
        self.stopping = False
        self.joined = welcome.started
        self._around, self._worker, self._state = around, worker, around.state
        self._at_work, self._held = welcome.started, False
        if welcome.started:
            self._stand_at(welcome.step, welcome.cursor, welcome.skipped)

    def start(self, hold_at: int) -> None:
        """Send the parameters to the servers and begin the work, unless it has begun. hold_at: the step before which no
        task is assigned."""
        if not self._at_work:
            self._worker.servers.load(gather_states(self._state))
            guard = self._state.guard
            skipped = 0 if guard is None else guard.skipped
            self._worker.servers.start(self._state.step, self._state.cursor, hold_at, skipped)
            self._at_work = True

    def run(self, until: int) -> Iterator[StepResult]:
        """Take tasks until the servers hold this worker, which is at `until`; or earlier, where a former life of it has
        named another step."""
        self.start(until)
        for answer, pulled in self._worker.answers(self._around.updated, until if self._held else None):
            for complete in answer.results:
                yield self._result(complete, pulled)
            self._catch_up(answer)
            self.stopping = answer.stopping
        self._held = True

    @contextmanager
    def consistent(self, *, optimizer: bool) -> Iterator[None]:
        """Inside, with `optimizer`, this rank has the servers' optimizer state; `run` has pulled the parameters."""
        if optimizer:
            scatter_states(self._state, self._worker.servers.fetch())
        yield

    def _result(self, complete: CompleteStep, pulled: Pulled) -> StepResult:
        worker, state = self._worker, self._state
        if complete.step >= state.step:
            self._count_skipped(complete)
            state.step = complete.step + 1
            state.cursor = state.sampler.advance(state.cursor)
        # Without a part that is used there is no loss.
        unused = math.nan if complete.skipped else 0.0
        loss = complete.loss / complete.weight if complete.weight else unused
        sent, worker.sent_bytes = worker.sent_bytes, 0
        norm = self._norm(complete.step, pulled)
        return StepResult(
            step=complete.step + 1,
            # Summed over the worker's ranks.
            loss=torch.tensor(loss if worker.world.first else 0.0, dtype=torch.float64),
            weight=complete.weight,
            own_weight=complete.weight,
            gradient_norm=GradientNorm(norm),
            samples=complete.samples,
            rate=learning_rate(self._around.config.training, complete.step),
            loading_seconds=worker.loading_seconds,
            gradient_bytes=sent,
            skipped=complete.skipped > 0 and not complete.weight,
            skipped_steps=None if state.guard is None else state.guard.skipped,
        )

    def _count_skipped(self, complete: CompleteStep) -> None:
        """Raise NonFiniteLoss where a worker has skipped too many parts in a row."""
        guard, step = self._state.guard, complete.step + 1
        if guard is None or not complete.skipped:
            return
        guard.skipped += complete.skipped
        worker = f"worker {complete.worker}, whose log says why"
        rows = f"{complete.in_row} parts in a row have a gradient that is not used, the last of them one of step {step}"
        first = f"the gradient of a part of step {step} is not used"
        guard.require_few(complete.in_row, step, f"{rows if complete.in_row > 1 else first}: those of {worker}")

    def _norm(self, step: int, pulled: Pulled) -> torch.Tensor:
        if not self._worker.computes_norm and step in pulled.squares:
            return torch.tensor(math.sqrt(pulled.squares[step]), dtype=torch.float64)
        return self._worker.norm.detach().to("cpu", torch.float64)

    def _catch_up(self, answer: Answer) -> None:
        """Stand where the job stands; results of steps may have been lost with a manager."""
        if answer.floor > self._state.step:
            self._stand_at(answer.floor, answer.floor_cursor, answer.skipped)

    def _stand_at(self, step: int, cursor: Cursor, skipped: int) -> None:
        state = self._state
        state.step, state.cursor = step, cursor
        if state.guard is not None:
            state.guard.skipped = skipped


def follow(config: Config, world: World, reporter: Reporter, stop: StopRequest) -> State:
    """Work as one of the other workers until the job has done its last step. Raises TrainerError.

    config: of the job. world: of this worker's ranks. The State holds the parameters pulled last.
    """
    state = build_worker_state(config, world)
    if config.initial_weights is not None and not all(one.requires_grad for one in state.module.parameters()):
        # Servers hold what is trained. The rest never changes, so it is that of the files in every attempt.
        load_weights(state.module, config.initial_weights, world)
    worker = connect(config, world, state, lambda: stop.requested)
    stop.loop_started(config.grace_seconds)
    try:
        welcome = worker.servers.hello(state.data.size or 0)
        for name in tables_of(state.module):
            let_go(state.module.get_parameter(name))
        reporter.update(total_steps=config.training.steps, step=welcome.step)
        progress = Progress(config, reporter, welcome.step)
        reporter.follow(lambda: progress.step)
        # Names of traces are those of the job's ranks.
        among = replace(world, rank=config.rank, size=config.world_size)
        profiled = profiling(config.training.profiling, among, config.metrics_folder, state.step)
        with profiled as profiler, explaining_cuts(config, world, state):
            for answer, _ in worker.answers(profiler.step):
                progress.catch_up(answer)
    finally:
        worker.servers.close()
    return state


@dataclass
class Progress:
    """Tells this pod's agent how far the job is, which counts when the pod is made again."""

    config: Config
    reporter: Reporter
    step: int
    """The last step that the job has done, as far as this worker knows."""

    def catch_up(self, answer: Answer) -> None:
        """Look at the volume as often as a checkpoint is due."""
        self.step = answer.floor
        interval = (self.config.training.checkpoint or Checkpoint()).interval
        if answer.floor // interval == self.reporter.report.step // interval:
            return
        folder = self.config.checkpoint_folder
        seen = newest_seen(folder) if isinstance(folder, Path) else None
        self.reporter.update(step=answer.floor, checkpoint=seen)
