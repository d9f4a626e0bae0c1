"""A worker of a job whose parameters lie on servers.

    ask for a task -> pull the parameters -> gradients of the task's samples -> push them -> ask for the next one

A worker is a world of one rank: it shares no process group with the others, so that nobody's death is anybody else's.
The worker of rank 0 leads: it also starts the job, reports it, evaluates and writes the checkpoints, which are those of
any other layout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import Pushed
from disttrain_trainer.checkpoint import Checkpoints
from disttrain_trainer.config import Config
from disttrain_trainer.data.batches import load_microbatch
from disttrain_trainer.due import next_due
from disttrain_trainer.errors import InvalidConfiguration, Stopped
from disttrain_trainer.mesh import World
from disttrain_trainer.parallel.expert import expert_layers
from disttrain_trainer.parallel.gradient_norm import clip, total_norm
from disttrain_trainer.parameter_server.client import Answer, Pulled, Servers, Welcome
from disttrain_trainer.parameter_server.content import Content, Gradients, build_content
from disttrain_trainer.parameter_server.figures import Rates
from disttrain_trainer.parameter_server.optimizer_state import gather_states, scatter_states
from disttrain_trainer.parameter_server.pushing import watched
from disttrain_trainer.parameter_server.settings import goes_on_from_snapshots, is_together, settings_of
from disttrain_trainer.parameter_server.tables import Tables, let_go, tables_of
from disttrain_trainer.parameter_server.tasks import LEADER, StepResult, Task, Verdict
from disttrain_trainer.parameter_server.wire import key_of
from disttrain_trainer.profiling import profiling
from disttrain_trainer.randomness import seed_everything
from disttrain_trainer.recipe import build_state
from disttrain_trainer.report import Metrics, Reporter
from disttrain_trainer.schedules import rate_factor
from disttrain_trainer.state import State
from disttrain_trainer.stop import StopRequest
from disttrain_trainer.train import (
    accumulate_gradients,
    open_checkpoints,
    run_evaluation,
    save,
    start_metrics,
    stopped,
)


def alone(config: Config) -> Config:
    """The config of a world of this worker alone."""
    return replace(config, rank=0, world_size=1, mesh=Mesh())


def require_plain_pushes(config: Config, tables: Collection[str]) -> None:
    """Raises InvalidConfiguration where tables meet settings that are about whole parameters."""
    compression = config.job.parallelism.data_parallel.compression
    settings = {
        "parameterServer.push: Parameters": settings_of(config).push is Pushed.PARAMETERS,
        "compression": compression is not None,
    }
    for name in (name for name, given in settings.items() if given and tables):
        raise InvalidConfiguration(
            f"`parallelism.dataParallel.{name}` does not go with {next(iter(tables))} of an embedding with sparse=True,"
            " of which workers push the rows of their batch alone: remove one of the two"
        )


def work(config: Config, world: World, reporter: Reporter, stop: StopRequest) -> State:
    """Work until the job has done its last step; the State holds the parameters pulled last. Raises TrainerError.

    world: of this worker alone.
    """
    state = build_state(config, world)
    if expert_layers(state.module):
        raise InvalidConfiguration(
            f"`parallelism.dataParallel.mode` ParameterServer: {type(state.module).__name__} has layers with experts: "
            "how busy each is is counted over all workers in each step; use AllReduce"
        )
    state.sampler = replace(state.sampler, replicas=config.world_size)
    seed_everything(config.training.seed, 1 + config.rank)
    named = {name: value for name, value in state.module.named_parameters() if value.requires_grad}
    for parameter in named.values():
        parameter.data = parameter.data.contiguous()
    key = key_of(config.token, config.job.uid, config.attempt)
    patience = config.timeout.total_seconds()
    replaceable = goes_on_from_snapshots(config)
    modules = tables_of(state.module)
    require_plain_pushes(config, modules)
    widths = {name: named[name].shape[1] for name in modules}
    servers = Servers(config.servers, key, config.rank, named, lambda: stop.requested, patience, replaceable, widths)
    content = build_content(config, servers.placement, named, state)
    worker = Worker(config, world, state, servers, content, Tables(modules, servers.pull_rows))
    stop.loop_started(config.grace_seconds)
    try:
        welcome = servers.hello(len(state.data.training))
        leader = begin(worker, welcome, reporter) if config.rank == LEADER else None
        if leader is None:
            for name in modules:
                let_go(named[name])
            reporter.update(total_steps=config.training.steps)
        run(worker, leader)
    finally:
        servers.close()
    return state


@dataclass
class Worker:
    """One worker. `norm`: of its last gradient, before clipping."""

    config: Config
    world: World
    """Of this rank alone."""
    state: State
    servers: Servers
    content: Content
    tables: Tables
    norm: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    loading_seconds: float = 0.0
    sent_bytes: int = 0

    @property
    def among(self) -> World:
        """This worker among the others, for names and counts; not for talking to them."""
        return replace(self.world, rank=self.config.rank, size=self.config.world_size)

    @property
    def updates(self) -> bool:
        """Whether this worker updates the parameters, and the servers average."""
        return settings_of(self.config).push is Pushed.PARAMETERS

    @property
    def norm_is_ours(self) -> bool:
        """Whether the gradient that counts is this worker's; else it is a sum that servers alone see."""
        return self.updates or not is_together(self.config)

    @property
    def ready_early(self) -> dict[str, torch.nn.Parameter]:
        """The parameters whose gradients are pushed as they come: nothing is done to them once they are complete."""
        if self.updates or self.config.training.max_gradient_norm is not None:
            return {}
        return {
            name: parameter
            for name, parameter in self.state.module.named_parameters()
            if parameter.requires_grad and not self.tables.has(name)
        }

    def compute(self, answer: Answer, pulled: Pulled) -> tuple[Task, float, float, float]:
        """Compute and push the task; the task with its loss (summed), weight and samples."""
        assert answer.task is not None
        state, task = self.state, answer.task
        self.tables.pulled(whole=False)
        begin = time.monotonic()
        slots = state.sampler.microbatches(answer.cursor, task.part)
        microbatches = [load_microbatch(state.data.training, slot, self.world.device.torch) for slot in slots]
        self.loading_seconds = time.monotonic() - begin
        weight = sum(microbatch.weight for microbatch in microbatches)
        samples = sum(microbatch.samples for microbatch in microbatches)
        if self.updates:
            scatter_states(state, self.servers.fetch())
        self.content.begin(task, weight)
        # The mean over this part; the servers weigh it by the part's weight.
        pushing = self.servers.begin_push(task, weight, pulled, answer.floor, self.content)
        with watched(self.ready_early, len(microbatches), pushing.ready):
            loss = accumulate_gradients(state, microbatches, weight or 1.0, samples or 1.0, replicas=1)
        self._settle_gradients()
        if self.updates and weight > 0:
            self._update(task)
        self.sent_bytes += self.servers.end_push(pushing, self.content)
        state.optimizer.zero_grad()
        return task, float(loss) * weight, weight, samples

    def _settle_gradients(self) -> None:
        """Gradients as they will be pushed: those of tables as rows, and clipped where this worker's own count."""
        rows = self.tables.take_gradients()
        if isinstance(self.content, Gradients):
            self.content.rows = rows
        held = list(self.state.parameters)
        for parameter in held:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        for gradient in rows.values():
            held.append(torch.nn.Parameter(gradient.values))
            held[-1].grad = gradient.values
        if self.norm_is_ours:
            self.norm = total_norm(held, self.world)
            if self.config.training.max_gradient_norm is not None:
                clip(held, self.norm, self.config.training.max_gradient_norm)

    def _update(self, task: Task) -> None:
        """One step of this worker's own optimizer."""
        training = self.config.training
        for group in self.state.optimizer.param_groups:
            group["lr"] = training.optimizer.learning_rate * rate_factor(
                training.lr_schedule, task.step, training.steps
            )
        self.state.optimizer.step()


@dataclass
class Leader:
    """What the worker of rank 0 does besides."""

    worker: Worker
    checkpoints: Checkpoints | None
    metrics: Metrics
    reporter: Reporter

    def note(self, results: list[StepResult], pulled: Pulled) -> None:
        """Record and log the steps that are complete."""
        training, state = self.worker.config.training, self.worker.state
        for result in results:
            if result.step >= state.step:
                state.step = result.step + 1
                state.cursor = state.sampler.advance(state.cursor)
            self.metrics.record(
                loss=torch.tensor(result.loss / (result.weight or 1.0), dtype=torch.float64),
                weight=result.weight,
                own_weight=result.weight,
                gradient_norm=self._norm(result.step, pulled),
                samples=result.samples,
                rate=training.optimizer.learning_rate * rate_factor(training.lr_schedule, result.step, training.steps),
                loading_seconds=self.worker.loading_seconds,
                routing=None,
                gradient_bytes=self.worker.sent_bytes,
            )
            self.worker.sent_bytes = 0
            if result.step + 1 == training.steps or (result.step + 1) % training.logging.interval == 0:
                self.metrics.log(result.step + 1)

    def catch_up(self, answer: Answer) -> None:
        """Stand where the job stands; results of steps may have been lost with a manager."""
        if answer.floor > self.worker.state.step:
            self.worker.state.step, self.worker.state.cursor = answer.floor, answer.floor_cursor

    def hold(self) -> None:
        """What is due after the step that the job stands at, whose parameters were just pulled."""
        config, state = self.worker.config, self.worker.state
        last = state.step == config.training.steps
        interval = config.training.evaluation.interval
        figures: dict[str, float] = {}
        if last or (interval and state.step % interval == 0):
            figures = run_evaluation(state, config, self.worker.world, self.metrics)
        if self.checkpoints is not None and (last or self.checkpoints.due(state.step)):
            self.fetch()
            save(state, self.checkpoints, self.metrics, self.reporter, figures, wait=last)

    def fetch(self) -> None:
        """The servers' optimizer state becomes this rank's, for the checkpoint."""
        scatter_states(self.worker.state, self.worker.servers.fetch())

    def _norm(self, step: int, pulled: Pulled) -> torch.Tensor:
        if not self.worker.norm_is_ours and step in pulled.squares:
            return torch.tensor(math.sqrt(pulled.squares[step]), dtype=torch.float64)
        return self.worker.norm.detach().to("cpu", torch.float64)


def begin(worker: Worker, welcome: Welcome, reporter: Reporter) -> Leader:
    """Restore and hand the parameters to the servers, unless they are at work already."""
    config, state, servers = worker.config, worker.state, worker.servers
    checkpoints = open_checkpoints(config, worker.world, state, reporter)
    metrics = start_metrics(config, worker.among, state, reporter)
    metrics.figures = Rates(servers).figures
    if welcome.started:
        state.step, state.cursor = welcome.step, welcome.cursor
    else:
        servers.load(gather_states(state))
        servers.start(state.step, state.cursor, next_due(state.step, config.training, checkpoints is not None))
    return Leader(worker, checkpoints, metrics, reporter)


def run(worker: Worker, leader: Leader | None) -> None:
    """Task after task until there are no more. Raises Stopped after SIGTERM."""
    servers, state, training = worker.servers, worker.state, worker.config.training
    done, hold_at = None, None
    with profiling(training.profiling, worker.among, worker.config.metrics_folder, state.step) as profiler:
        while True:
            answer = servers.next(done, hold_at)
            done = hold_at = None
            if answer.verdict is Verdict.STOP:
                raise Stopped("SIGTERM: stopped; what this worker had not begun is for the others")
            if answer.verdict is Verdict.DONE:
                return
            # Who leads evaluates and saves all that there is.
            pulled = servers.pull(answer.complete, whole=answer.verdict is not None)
            if leader is not None:
                leader.note(answer.results, pulled)
                leader.catch_up(answer)
            if answer.verdict is None:
                done = worker.compute(answer, pulled)
                profiler.step()
            elif leader is not None:
                worker.tables.pulled(whole=True)
                leader.hold()
                if answer.stopping and state.step < training.steps:
                    leader.fetch()
                    reason = stopped(state, leader.checkpoints, leader.metrics, leader.reporter)
                    servers.finish()
                    raise reason
                if state.step == training.steps:
                    servers.finish()
                    return
                hold_at = next_due(state.step, training, leader.checkpoints is not None)
