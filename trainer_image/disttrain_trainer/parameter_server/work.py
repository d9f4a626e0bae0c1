"""A worker of a job whose parameters lie on servers.

    ask for a task -> pull the parameters -> gradients of the task's samples -> push them -> ask for the next one

A worker is a world of one rank, or of the ranks of a pod (group.py), which run this loop together. It shares no process
group with other workers, so that nobody's death is anybody else's. The first worker leads: it also starts the job,
reports it, evaluates and writes the checkpoints, which are those of any other layout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from disttrain_api.parallelism import Pushed
from disttrain_api.training import Checkpoint
from disttrain_trainer.between_steps import do_what_is_due, evaluate_restored, save_is_due, stopped
from disttrain_trainer.checkpoint import Checkpoints
from disttrain_trainer.config import Config
from disttrain_trainer.cut_errors import explaining_cuts
from disttrain_trainer.due import next_due
from disttrain_trainer.errors import InvalidConfiguration, Stopped
from disttrain_trainer.mesh import World
from disttrain_trainer.parallel.expert import expert_layers
from disttrain_trainer.parallel.gradient_norm import clip, total_norm
from disttrain_trainer.parameter_server.client import Answer, Servers, Welcome
from disttrain_trainer.parameter_server.content import Content, Gradients, Nothing, build_content
from disttrain_trainer.parameter_server.figures import Rates
from disttrain_trainer.parameter_server.group import GroupPulling, GroupServers, worker_of
from disttrain_trainer.parameter_server.known import Task
from disttrain_trainer.parameter_server.optimizer_state import gather_states, scatter_states
from disttrain_trainer.parameter_server.pieces import Pieces, trained
from disttrain_trainer.parameter_server.pulling import Pulled, Pulling, arriving, can_wait
from disttrain_trainer.parameter_server.pushing import watched
from disttrain_trainer.parameter_server.settings import goes_on_from_snapshots, is_together, settings_of
from disttrain_trainer.parameter_server.tables import Tables, let_go, tables_of
from disttrain_trainer.parameter_server.tasks import LEADER, StepResult, Verdict
from disttrain_trainer.parameter_server.wire import key_of
from disttrain_trainer.profiling import profiling
from disttrain_trainer.randomness import seed_everything
from disttrain_trainer.recipe import build_state
from disttrain_trainer.report import Metrics, Reporter
from disttrain_trainer.schedules import learning_rate
from disttrain_trainer.start import open_checkpoints, start_metrics
from disttrain_trainer.state import State
from disttrain_trainer.step import accumulate_gradients, clip_gradients, load_step
from disttrain_trainer.stop import StopRequest
from disttrain_trainer.storage import newest_seen


def require_plain_pushes(config: Config, tables: Collection[str]) -> None:
    """Raises InvalidConfiguration where tables meet settings that are about whole parameters."""
    compression, settings = config.job.parallelism.data_parallel.compression, settings_of(config)
    given = {
        "parameterServer.push: Parameters": settings.push is Pushed.PARAMETERS,
        "parameterServer.groupReduce": settings.group_reduce is not None,
        "compression": compression is not None,
    }
    for name in (name for name, is_given in given.items() if is_given and tables):
        raise InvalidConfiguration(
            f"`parallelism.dataParallel.{name}` does not go with {next(iter(tables))} of an embedding with sparse=True,"
            " of which workers push the rows of their batch alone: remove one of the two"
        )


def work(config: Config, world: World, reporter: Reporter, stop: StopRequest) -> State:
    """Work until the job has done its last step; the State holds the parameters pulled last. Raises TrainerError.

    config: of the job. world: of this worker's ranks.
    """
    state = build_state(config, world)
    if expert_layers(state.module):
        raise InvalidConfiguration(
            f"`parallelism.dataParallel.mode` ParameterServer: {type(state.module).__name__} has layers with experts: "
            "how busy each is is counted over all workers in each step; use AllReduce"
        )
    number, replicas = worker_of(config), config.mesh.data_parallel
    state.sampler = replace(state.sampler, replicas=replicas)
    replica, stage = number * world.replicas + world.replica, world.mesh.coordinates(world.rank)["pipeline"]
    seed_everything(config.training.seed, 1 + replica + replicas * stage)
    modules = tables_of(state.module)
    require_plain_pushes(config, modules)
    worker = connect(config, world, state, modules, stop)
    servers = worker.servers
    stop.loop_started(config.grace_seconds)
    try:
        welcome = servers.hello(len(state.data.training))
        leader = begin(worker, welcome, reporter) if number == LEADER else None
        if leader is None:
            for name in modules:
                let_go(state.module.get_parameter(name))
            reporter.update(total_steps=config.training.steps, step=welcome.step)
        role = leader or Follower(config, reporter, welcome.step)
        reporter.follow(lambda: role.step)
        run(worker, role)
    finally:
        servers.close()
    return state


def connect(config: Config, world: World, state: State, tables: Mapping[str, nn.Module], stop: StopRequest) -> Worker:
    """This rank of a worker, with the servers of the state's trained parameters. tables: the modules of which workers
    pull rows, by the name of the parameter."""
    named = trained(state)
    for parameter in named.values():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.contiguous()
    widths = {name: named[name].shape[1] for name in tables}

    def to_servers_of(parameters: Mapping[str, nn.Parameter]) -> Servers:
        key = key_of(config.token, config.job.uid, config.attempt)
        patience = config.timeout.total_seconds()
        return Servers(
            config.servers, key, worker_of(config), parameters, lambda: stop.requested, patience,
            goes_on_from_snapshots(config), widths,
        )  # fmt: skip

    if world.size > 1:
        # Who has tables was refused: the hooks that pull rows ask for what one rank needs.
        pieces = Pieces(world, state)
        group = GroupServers(world, pieces, to_servers_of)
        content = build_content(config, group.placement, pieces.whole, state) if world.first else Nothing()
        return Worker(config, world, state, group, content, Tables({}, lambda name, places: None))
    servers = to_servers_of(named)
    content = build_content(config, servers.placement, named, state)
    return Worker(config, world, state, servers, content, Tables(tables, servers.pull_rows))


@dataclass
class Worker:
    """One worker, as one of its ranks has it. `norm`: of its last gradient, before clipping."""

    config: Config
    world: World
    """Of this worker's ranks."""
    state: State
    servers: Servers | GroupServers
    content: Content
    tables: Tables
    norm: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    loading_seconds: float = 0.0
    sent_bytes: int = 0

    @property
    def among(self) -> World:
        """This rank among those of all workers, for names and counts; not for talking to them."""
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
        if self.world.size > 1 or self.updates or self.config.training.max_gradient_norm is not None:
            return {}
        return {
            name: parameter
            for name, parameter in self.state.module.named_parameters()
            if parameter.requires_grad and not self.tables.has(name)
        }

    @cached_property
    def computes_meanwhile(self) -> bool:
        """Whether the forward pass begins before all parameters have come; an own update compares with all of them."""
        return not self.updates and self.state.model is self.state.module and can_wait(self.state.module)

    def compute(self, answer: Answer, pulling: Pulling | GroupPulling) -> tuple[Task, float, float, float]:
        """Compute and push the task; the task with its loss (summed), weight and samples."""
        assert answer.task is not None
        state, world, task = self.state, self.world, answer.task
        self.tables.pulled(whole=False)
        begin = time.monotonic()
        microbatches = load_step(state, world, answer.cursor, task.part * world.replicas)
        self.loading_seconds = time.monotonic() - begin
        own_weight = sum(microbatch.weight for microbatch in microbatches)
        own_samples = sum(microbatch.samples for microbatch in microbatches)
        weight, samples = world.sum(own_weight * world.speaks, own_samples * world.speaks)
        if not self.computes_meanwhile:
            pulling.rest()
        if self.updates:
            scatter_states(state, self.servers.fetch())
        self.content.begin(task, weight)
        # The mean over this part; the servers weigh it by the part's weight.
        pushing = self.servers.begin_push(task, weight, pulling.pulled, answer.floor, self.content)
        with (
            arriving(state.module, pulling.waits_for, pulling.need),
            watched(self.ready_early, len(microbatches), pushing.ready),
        ):
            own_loss = accumulate_gradients(state, microbatches, weight or 1.0, samples or 1.0, world.replicas)
        (loss,) = world.sum(float(own_loss) * world.speaks)
        self._settle_gradients()
        if self.updates and weight > 0:
            self._update(task)
        self.sent_bytes += self.servers.end_push(pushing, self.content)
        state.optimizer.zero_grad()
        return task, loss * weight, weight, samples

    def _settle_gradients(self) -> None:
        """Gradients as they will be pushed: those of tables as rows, and clipped where this worker's own count."""
        if self.world.size > 1:
            if self.norm_is_ours:
                self.norm = clip_gradients(self.state, self.config.training.max_gradient_norm, self.world)
            return
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
            group["lr"] = learning_rate(training, task.step)
        self.state.optimizer.step()


@dataclass
class Leader:
    """What the first worker does besides."""

    worker: Worker
    checkpoints: Checkpoints | None
    metrics: Metrics
    reporter: Reporter
    logged: int = 0
    """Steps that a former life of this worker has logged, and may be told of again."""

    @property
    def step(self) -> int:
        """The last step that the job has done."""
        return self.worker.state.step

    def note(self, results: list[StepResult], pulled: Pulled) -> None:
        """Record and log the steps that are complete."""
        worker, training, state = self.worker, self.worker.config.training, self.worker.state
        for result in results:
            if result.step >= state.step:
                state.step = result.step + 1
                state.cursor = state.sampler.advance(state.cursor)
            if result.step < self.logged:
                continue
            self.metrics.record(
                # Metrics sum it over the worker's ranks.
                loss=torch.tensor(result.loss / (result.weight or 1.0), dtype=torch.float64) * worker.world.first,
                weight=result.weight,
                own_weight=result.weight,
                gradient_norm=self._norm(result.step, pulled),
                samples=result.samples,
                rate=learning_rate(training, result.step),
                loading_seconds=worker.loading_seconds,
                routing=None,
                gradient_bytes=worker.sent_bytes,
            )
            worker.sent_bytes = 0
            if result.step + 1 == training.steps or (result.step + 1) % training.logging.interval == 0:
                self.metrics.log(result.step + 1)

    def catch_up(self, answer: Answer) -> None:
        """Stand where the job stands; results of steps may have been lost with a manager."""
        if answer.floor > self.worker.state.step:
            self.worker.state.step, self.worker.state.cursor = answer.floor, answer.floor_cursor

    def hold(self) -> None:
        """What is due after the step that the job stands at, whose parameters were just pulled."""
        worker = self.worker
        if self.checkpoints is not None and save_is_due(worker.config, worker.state, self.checkpoints):
            self.fetch()
        do_what_is_due(worker.config, worker.world, worker.state, self.metrics, self.checkpoints, self.reporter)

    def fetch(self) -> None:
        """The servers' optimizer state becomes this rank's, for the checkpoint."""
        scatter_states(self.worker.state, self.worker.servers.fetch())

    def _norm(self, step: int, pulled: Pulled) -> torch.Tensor:
        if not self.worker.norm_is_ours and step in pulled.squares:
            return torch.tensor(math.sqrt(pulled.squares[step]), dtype=torch.float64)
        return self.worker.norm.detach().to("cpu", torch.float64)


@dataclass
class Follower:
    """What the others do besides: tell their agents how far the job is, which counts when their pods are made again."""

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


def begin(worker: Worker, welcome: Welcome, reporter: Reporter) -> Leader:
    """Restore and hand the parameters to the servers, unless they are at work already."""
    config, state, servers = worker.config, worker.state, worker.servers
    checkpoints = open_checkpoints(config, worker.world, state, reporter)
    metrics = start_metrics(config, worker.among, state, reporter)
    of_layout, rates = metrics.figures, Rates(servers)
    metrics.figures = lambda: {**of_layout(), **rates.figures()}
    if welcome.started:
        state.step, state.cursor = welcome.step, welcome.cursor
        logged = worker.world.from_first(metrics.last_logged, int)
    else:
        logged = 0
        evaluate_restored(config, worker.world, state, metrics, checkpoints, reporter)
        servers.load(gather_states(state))
        servers.start(state.step, state.cursor, next_due(state.step, config.training, checkpoints is not None))
    return Leader(worker, checkpoints, metrics, reporter, logged)


def run(worker: Worker, role: Leader | Follower) -> None:
    """Task after task until there are no more. Raises Stopped after SIGTERM."""
    leader = role if isinstance(role, Leader) else None
    servers, state, training = worker.servers, worker.state, worker.config.training
    done, hold_at = None, None
    profiled = profiling(training.profiling, worker.among, worker.config.metrics_folder, state.step)
    with profiled as profiler, explaining_cuts(worker.config, worker.world, state):
        while True:
            answer = servers.next(done, hold_at)
            done = hold_at = None
            if answer.verdict is Verdict.STOP:
                raise Stopped("SIGTERM: stopped; what this worker had not begun is for the others")
            if answer.verdict is Verdict.DONE:
                return
            # Who leads evaluates and saves all that there is.
            pulling = servers.begin_pull(answer.complete, whole=answer.verdict is not None)
            if leader is not None:
                leader.note(answer.results, pulling.pulled)
            role.catch_up(answer)
            if answer.verdict is None:
                done = worker.compute(answer, pulling)
                profiler.step()
            elif leader is not None:
                pulling.rest()
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
