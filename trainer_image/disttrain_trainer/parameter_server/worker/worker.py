"""A worker of a job whose parameters lie on servers. Its part in the loop: strategies/parameter_server.py.

    ask for a task -> pull the parameters -> gradients of the task's samples -> push them -> ask for the next one

A worker is a world of one rank, or of the ranks of a pod (group.py), which run this loop together. It shares no process
group with other workers, so that nobody's death is anybody else's. The first worker leads: it also starts the job,
reports it, evaluates and writes the checkpoints, which are those of any other layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from disttrain_api.parallelism import Pushed
from disttrain_api.training import ModelName
from disttrain_trainer.build import build_state
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.optim.schedules import learning_rate
from disttrain_trainer.parallel.expert import expert_layers
from disttrain_trainer.parallel.gradient_norm import clip, total_norm
from disttrain_trainer.parameter_server.protocol.settings import (
    is_together,
    resumes_from_snapshots,
    settings_of,
    worker_of,
)
from disttrain_trainer.parameter_server.protocol.tasks import Result, Task, Verdict
from disttrain_trainer.parameter_server.protocol.wire import key_of
from disttrain_trainer.parameter_server.worker.client import Answer, Servers
from disttrain_trainer.parameter_server.worker.embedding_tables import EmbeddingTables, tables_of
from disttrain_trainer.parameter_server.worker.full_parameters import FullParameters, trained
from disttrain_trainer.parameter_server.worker.group import GroupPulling, GroupServers
from disttrain_trainer.parameter_server.worker.optimizer_state import scatter_states
from disttrain_trainer.parameter_server.worker.payload import EmptyPayload, GradientPayload, Payload, build_payload
from disttrain_trainer.parameter_server.worker.pulling import Pulled, Pulling, arriving, can_wait
from disttrain_trainer.parameter_server.worker.pushing import watched
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import InvalidConfiguration, Stopped
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import seed_everything
from disttrain_trainer.state import State
from disttrain_trainer.step import accumulate_gradients, clip_gradients, read_step


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
            f"`parallelism.dataParallel.{name}` conflicts with {next(iter(tables))} of an embedding with sparse=True,"
            " of which workers push the rows of their batch alone: remove one of the two"
        )


def ready_early(config: Config, world: World, state: State) -> dict[str, nn.Parameter]:
    """The parameters whose gradients are pushed as they come: nothing is done to them once they are complete."""
    updates, training = settings_of(config).push is Pushed.PARAMETERS, config.training
    # Whether a part is skipped is known when all of its gradient is.
    if world.size > 1 or updates or training.max_gradient_norm is not None or training.skip_steps is not None:
        return {}
    tables, named = tables_of(state.module), state.module.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad and name not in tables}


def build_worker_state(config: Config, world: World) -> State:
    """The State before the first step of a worker's rank. config: of the job. world: of this worker's ranks.

    Raises InvalidConfiguration where servers cannot hold what the model has.
    """
    state = build_state(config, world)
    if expert_layers(state.module):
        raise InvalidConfiguration(
            f"`parallelism.dataParallel.mode` ParameterServer: {type(state.module).__name__} has layers with experts: "
            "how busy each is is counted over all workers in each step; use AllReduce"
        )
    number, replicas = worker_of(config), config.mesh.data_parallel
    state.sampler = replace(state.sampler, replicas=replicas)
    replica, stage = number * world.replicas + world.replica, world.at["pipeline"]
    seed_everything(config.training.seed, 1 + replica + replicas * stage)
    require_plain_pushes(config, tables_of(state.module))
    _require_files_of_frozen(config, state)
    return state


def _require_files_of_frozen(config: Config, state: State) -> None:
    """Raise InvalidConfiguration where the first worker alone, which reads checkpoints, would have the model that is
    adapted: servers hold what is trained."""
    kept = config.training.checkpoint
    adapts = config.training.model.name is ModelName.TRANSFORMERS and not all(
        one.requires_grad for one in state.module.parameters()
    )
    if adapts and kept is not None and kept.folder is not None and kept.initial_from is None:
        raise InvalidConfiguration(
            "`training.checkpoint.folder`: with `mode` ParameterServer the first worker alone reads checkpoints, and "
            "the others need the weights that adapters adapt: name them in `training.checkpoint.initialFrom`, too"
        )


def connect(config: Config, world: World, state: State, stopping: Callable[[], bool]) -> Worker:
    """This rank of a worker, with the servers of the state's trained parameters.

    stopping: whether this worker was told to stop.
    """
    named, tables = trained(state), tables_of(state.module)
    for parameter in named.values():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.contiguous()
    widths = {name: named[name].shape[1] for name in tables}

    def to_servers_of(parameters: Mapping[str, nn.Parameter]) -> Servers:
        key = key_of(config.token, config.job.uid, config.attempt)
        patience = config.timeout.total_seconds()
        return Servers(
            config.servers, key, worker_of(config), parameters, stopping, patience,
            resumes_from_snapshots(config), widths,
        )  # fmt: skip

    if world.size > 1:
        # Who has tables was refused: the hooks that pull rows ask for what one rank needs.
        full = FullParameters(world, state)
        group = GroupServers(world, full, to_servers_of)
        payload = build_payload(config, group.placement, full.whole, state) if world.first else EmptyPayload()
        return Worker(config, world, state, group, payload, EmbeddingTables({}, lambda name, places: None))
    servers = to_servers_of(named)
    payload = build_payload(config, servers.placement, named, state)
    return Worker(config, world, state, servers, payload, EmbeddingTables(tables, servers.pull_rows))


@dataclass
class Worker:
    """One worker, as one of its ranks has it. `norm`: of its last gradient, before clipping."""

    config: Config
    world: World
    """The ranks of this worker."""
    state: State
    servers: Servers | GroupServers
    payload: Payload
    tables: EmbeddingTables
    norm: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    loading_seconds: float = 0.0
    sent_bytes: int = 0

    def answers(self, updated: Callable[[], None], hold_at: int | None = None) -> Iterator[tuple[Answer, Pulled]]:
        """Do task after task. Yields what the manager answers, with what is pulled for it, before the task is computed.

        updated: called after each task. hold_at: the leader's next step before which nothing is to be assigned.
        Ends where all is done, and where the leader is held: all parameters have been pulled then.
        Raises Stopped where this worker was told to stop.
        """
        done = None
        while True:
            answer = self.servers.next(done, hold_at)
            hold_at = None
            if answer.verdict is Verdict.STOP:
                raise Stopped("SIGTERM: stopped; what this worker had not begun is for the others")
            if answer.verdict is Verdict.DONE:
                return
            # Who leads evaluates and saves all that there is.
            pulling = self.servers.begin_pull(answer.complete, whole=answer.verdict is not None)
            yield answer, pulling.pulled
            if answer.verdict is Verdict.HOLD:
                pulling.rest()
                self.tables.pulled(whole=True)
                return
            done = self.compute(answer, pulling)
            updated()

    @property
    def updates(self) -> bool:
        """Whether this worker updates the parameters, and the servers average."""
        return settings_of(self.config).push is Pushed.PARAMETERS

    @property
    def computes_norm(self) -> bool:
        """Whether the gradient that counts is this worker's; else it is a sum that servers alone see."""
        return self.updates or not is_together(self.config)

    @cached_property
    def _early(self) -> dict[str, nn.Parameter]:
        return ready_early(self.config, self.world, self.state)

    @cached_property
    def computes_meanwhile(self) -> bool:
        """Whether the forward pass begins before all parameters have come; an own update compares with all of them."""
        return not self.updates and self.state.model is self.state.module and can_wait(self.state.module)

    def compute(self, answer: Answer, pulling: Pulling | GroupPulling) -> tuple[Task, Result]:
        """Compute and push the task; the task with its result."""
        assert answer.task is not None
        state, world, task = self.state, self.world, answer.task
        self.tables.pulled(whole=False)
        begin = time.monotonic()
        microbatches = read_step(state, world, answer.cursor, task.part * world.replicas)
        self.loading_seconds = time.monotonic() - begin
        own_weight = sum(microbatch.weight for microbatch in microbatches)
        own_samples = sum(microbatch.samples for microbatch in microbatches)
        weight, samples = world.sum(own_weight * world.counts_replica, own_samples * world.counts_replica)
        if not self.computes_meanwhile:
            pulling.rest()
        if self.updates:
            scatter_states(state, self.servers.fetch())
        self.payload.begin(task, weight)
        # The mean over this part; the servers weigh it by the part's weight.
        pushing = self.servers.begin_push(task, weight, pulling.pulled, answer.floor, self.payload)
        with (
            arriving(state.module, pulling.waits_for, pulling.need),
            watched(self._early, len(microbatches), pushing.ready),
        ):
            own_loss = accumulate_gradients(state, microbatches, weight or 1.0, samples or 1.0, world.replicas)
        (loss,) = world.sum(float(own_loss) * world.counts_replica)
        norm = self._settle_gradients()
        in_row = 0 if norm is None or not weight else self._judge(task, loss, norm)
        if in_row:
            loss = weight = 0.0
            pushing.skip()
            self.payload.skip()
        elif norm is not None and self.computes_norm:
            self.norm = norm
        if self.updates and weight > 0:
            self._update(task)
        self.sent_bytes += self.servers.end_push(pushing, self.payload)
        state.optimizer.zero_grad()
        return task, Result(loss * weight, weight, samples, worker_of(self.config), in_row)

    def _judge(self, task: Task, loss: float, norm: torch.Tensor) -> int:
        """Return how many tasks in a row this worker is to skip, this one included; 0: it is to be used.

        loss, norm: of this part alone. Each worker learns from its own parts what is too large.
        """
        guard = self.state.guard
        reason = None if guard is None else guard.judge(loss, float(norm))
        if guard is None or reason is None:
            return 0
        log_first_rank(self.world, f"part {task.part} of step {task.step + 1} is skipped: its {reason}")
        return guard.in_row

    def _settle_gradients(self) -> torch.Tensor | None:
        """Make the gradients those to push: of tables as rows, and clipped where this worker's own count.

        Returns the 2-norm before clipping; None where nothing needs it.
        """
        maximum = self.config.training.max_gradient_norm if self.computes_norm else None
        needs_norm = self.computes_norm or self.state.guard is not None
        if self.world.size > 1:
            return clip_gradients(self.state, maximum, self.world)() if needs_norm else None
        rows = self.tables.take_gradients()
        if isinstance(self.payload, GradientPayload):
            self.payload.rows = rows
        held = list(self.state.parameters)
        for parameter in held:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        for gradient in rows.values():
            held.append(torch.nn.Parameter(gradient.values))
            held[-1].grad = gradient.values
        if not needs_norm:
            return None
        norm = total_norm(held, self.world)
        if maximum is not None:
            clip(held, norm, maximum)
        return norm

    def _update(self, task: Task) -> None:
        """One step of this worker's own optimizer."""
        training = self.config.training
        for group in self.state.optimizer.param_groups:
            group["lr"] = learning_rate(training, task.step)
        self.state.optimizer.step()
