"""What a worker pushes to parameter servers and pulls from them in a step: by its own payload, on tensors that have no
memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from disttrain_api.parallelism import DataParallelMode, Pushed
from disttrain_trainer.estimate.counter import SEND, WorkCounter
from disttrain_trainer.estimate.imagined import ValuesOfOne, all_at_first
from disttrain_trainer.parameter_server.protocol.placement import place
from disttrain_trainer.parameter_server.protocol.settings import group_mesh, settings_of, workers_of
from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.worker.embedding_tables import tables_of
from disttrain_trainer.parameter_server.worker.full_parameters import FullParameters, Key, trained
from disttrain_trainer.parameter_server.worker.payload import EmptyPayload, Parameters, build_payload
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
    if world.mesh.pipeline > 1:
        return "stages of a pipeline put the model together on a worker's first rank before it pushes"
    return None


class ImaginedParameters(FullParameters):
    """Those of a worker's ranks of which only this one exists: what the first one sends has no values."""

    def __init__(self, world: World, state: State, counter: WorkCounter) -> None:
        super().__init__(world, state)
        self._counter = counter

    @property
    def in_pieces(self) -> bool:
        """Return whether ranks hold pieces, which are put together in the host's memory."""
        return not self._copies

    @property
    def largest(self) -> int:
        """Return the bytes of the largest whole parameter."""
        return max(one.numel() * one.element_size() for one in self._own.values())

    @property
    def assembled(self) -> list[Tensor]:
        """Return what the first rank has beside its own pieces: whole parameters."""
        return [] if self._copies or not self._world.first else list(self.whole.values())

    def _spread(self, tensors: Mapping[Key, Tensor]) -> Iterator[tuple[Key, Tensor]]:
        if self._world.first:
            size = sum(one.nbytes for one in tensors.values())
            for rank in range(1, self._world.size):
                self._counter.add(SEND, (0, rank), size, len(tensors))
        else:
            tensors = {(name, ""): torch.empty(one.shape, dtype=one.dtype) for name, one in self._own.items()}
        yield from tensors.items()


class Pushes:
    """A worker's own pushes, which no server takes, as one of its ranks has them. To be built under FakeTensorMode."""

    def __init__(self, state: State, world: World, config: Config, counter: WorkCounter) -> None:
        """config: of the job."""
        self._state, self._config, self._own = state, config, trained(state)
        self._first, servers = world.first, max(len(config.servers), 1)
        self._group = ImaginedParameters(world, state, counter) if world.size > 1 else None
        self._named: Parameters = self._own if self._group is None else self._group.whole
        if not world.first:
            # It pushes nothing, but waits while the first rank pushes as much.
            whole = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in self._own.items()}
            self._named = {name: nn.Parameter(one) for name, one in whole.items()}
        self._placement = place({name: one.numel() for name, one in self._named.items()}, servers)
        self._payload = build_payload(config, self._placement, self._named, state)
        self._early = ready_early(config, world, state)
        self._begin(0)

    def warm_up(self) -> ServerTraffic:
        """Push as in a step after the warm-up, so that what the payload keeps is there."""
        for one in (*self._own.values(), *self._named.values()):
            one.grad = torch.empty_like(one)
        self._begin(self._config.training.steps)
        self.end()
        self._state.optimizer.zero_grad()
        pushed, pulled = self._pushing.bytes, sum(one.nbytes for one in self._named.values())
        # Who updates the parameters has the optimizer's state from the servers, too, as long as what it pushes.
        pulled = pushed if updates(self._config) else pulled
        traffic = ServerTraffic(workers_of(self._config), len(self._placement), pushed, pulled)
        if not self._first:
            self._payload = EmptyPayload()
        return traffic

    def kept(self) -> list[Tensor]:
        """What there is from one step to the next."""
        return [*self._payload.kept, *(self._group.assembled if self._group is not None else ())]

    def on_device(self, computing: int, computed: int) -> int | None:
        """Return the most bytes in the memory of a GPU, where the host's has a part; None where it has none.

        computing, computed: bytes of both, at most while the step is computed and at its end.
        """
        if self._group is None or not self._group.in_pieces:
            return None
        # Whole parameters come and go one by one.
        return max(computing, computed + self._group.largest) - sum(one.nbytes for one in self.kept())

    def begin(self) -> None:
        """Before the first pass of the step that holds the most."""
        if self._group is not None:
            self._group.spread()
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
        if self._group is not None:
            self._group.gather_gradients()
        with ValuesOfOne(), torch.no_grad():
            self._pushing.rest()
            self._payload.settle([True] * len(self._placement))
        if self._group is not None:
            self._group.drop_gradients()

    def _begin(self, step: int) -> None:
        # ValuesOfOne: a payload looks at the places that it sends.
        with ValuesOfOne(), torch.no_grad():
            self._payload.begin(Task(step, 0), 1.0)
        self._pushing = Pushing(self._placement, self._payload, [{}] * len(self._placement), lambda *_: None)
