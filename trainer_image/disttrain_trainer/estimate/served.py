"""What a worker pushes to parameter servers and pulls from them in a step: by its own payload, on tensors that have no
memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from disttrain_api.parallelism import DataParallelMode, Pushed
from disttrain_trainer.estimate.imagined import ValuesOfOne, all_at_first
from disttrain_trainer.parameter_server.protocol.placement import place
from disttrain_trainer.parameter_server.protocol.settings import group_mesh, settings_of, workers_of
from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.worker.embedding_tables import tables_of
from disttrain_trainer.parameter_server.worker.full_parameters import FullParameters, trained
from disttrain_trainer.parameter_server.worker.payload import build_payload
from disttrain_trainer.parameter_server.worker.pushing import Pushing, watched
from disttrain_trainer.parameter_server.worker.worker import ready_early
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State


@dataclass(frozen=True)
class ServerTraffic:
    """Bytes of the tensors between a worker and all servers in a step."""

    workers: int
    servers: int
    pushed: int
    pulled: int


def has_servers(config: Config) -> bool:
    """Whether the job's parameters lie on servers."""
    return config.job.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER


def of_worker(config: Config) -> Config:
    """The config of the ranks that take steps together: with parameter servers those of a worker, else all."""
    if not has_servers(config):
        return config
    mesh = group_mesh(config)
    return replace(config, rank=config.rank % mesh.world_size, world_size=mesh.world_size, mesh=mesh)


def updates(config: Config) -> bool:
    """Whether this rank's optimizer updates the parameters; else servers do, and hold its state."""
    return not has_servers(config) or settings_of(config).push is Pushed.PARAMETERS


def cannot_push(state: State, world: World) -> str | None:
    """Why it is not known what a worker pushes; None where it is."""
    if tables_of(state.module):
        return "which rows of tables (`sparse=True`) are pushed and pulled is known from data alone"
    if world.mesh.pipeline > 1 or any(isinstance(one, DTensor) for one in trained(state).values()):
        return "ranks of a worker that share a model put it together on their first one before they push"
    return None


class Pushes:
    """A worker's own pushes, which no server takes."""

    def __init__(self, state: State, world: World, config: Config) -> None:
        """config: of the job."""
        self._state, self._config = state, config
        self._named, servers = trained(state), max(len(config.servers), 1)
        self._placement = place({name: one.numel() for name, one in self._named.items()}, servers)
        self._payload = build_payload(config, self._placement, self._named, state)
        self._early = ready_early(config, world, state)
        self._begin(0)

    def warm_up(self) -> ServerTraffic:
        """Push as in a step after the warm-up, so that what the payload keeps is there."""
        for one in self._named.values():
            one.grad = torch.empty_like(one)
        self._begin(self._config.training.steps)
        self.end()
        self._state.optimizer.zero_grad()
        pushed, pulled = self._pushing.bytes, sum(one.nbytes for one in self._named.values())
        # Who updates the parameters has the optimizer's state from the servers, too, as long as what it pushes.
        pulled = pushed if updates(self._config) else pulled
        return ServerTraffic(workers_of(self._config), len(self._placement), pushed, pulled)

    def kept(self) -> list[Tensor]:
        """What the payload has from one step to the next."""
        return self._payload.kept

    def begin(self) -> None:
        """Before the first pass of the step that holds the most."""
        self._begin(0 if all_at_first(self._config) else self._config.training.steps)

    @contextmanager
    def watching(self, passes: int) -> Iterator[None]:
        """Write what is pushed before the passes are over."""

        def ready(name: str) -> None:
            with ValuesOfOne(), torch.no_grad():
                self._pushing.ready(name)

        with watched(self._early, passes, ready):
            yield

    def end(self) -> None:
        """Write the rest."""
        with ValuesOfOne(), torch.no_grad():
            self._pushing.rest()
            self._payload.settle([True] * len(self._placement))

    def _begin(self, step: int) -> None:
        # ValuesOfOne: a payload looks at the places that it sends.
        with ValuesOfOne(), torch.no_grad():
            self._payload.begin(Task(step, 0), 1.0)
        self._pushing = Pushing(self._placement, self._payload, [{}] * len(self._placement), lambda *_: None)


def spread(state: State, world: World, mode: FakeTensorMode) -> None:
    """Give the ranks of a worker what its first rank has pulled."""
    if world.size > 1:
        with mode:
            FullParameters(world, state).spread()
