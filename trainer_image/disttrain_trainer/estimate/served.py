"""What a worker pushes to parameter servers and pulls from them in a step: by its own payload, on tensors that have no
memory."""

from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from disttrain_api.parallelism import DataParallelMode, Pushed
from disttrain_trainer.estimate.imagined import ValuesOfOne
from disttrain_trainer.parameter_server.protocol.placement import place
from disttrain_trainer.parameter_server.protocol.settings import group_mesh, settings_of, workers_of
from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.worker.embedding_tables import tables_of
from disttrain_trainer.parameter_server.worker.full_parameters import FullParameters, trained
from disttrain_trainer.parameter_server.worker.payload import build_payload
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


def traffic_of(state: State, config: Config, mode: FakeTensorMode) -> ServerTraffic:
    """What a worker pushes and pulls in a step after the warm-up. config: of the job."""
    named, servers = trained(state), max(len(config.servers), 1)
    placement = place({name: one.numel() for name, one in named.items()}, servers)
    payload = build_payload(config, placement, named, state)
    # ValuesOfOne: a payload looks at the places that it sends.
    with mode, ValuesOfOne(), torch.no_grad():
        for one in named.values():
            one.grad = torch.empty_like(one)
        payload.begin(Task(config.training.steps, 0), 1.0)
        places = [(server, index) for server, segments in enumerate(placement) for index in range(len(segments))]
        pushed = sum(tensor.nbytes for place in places for tensor in payload.of(*place))
        state.optimizer.zero_grad()
    pulled = sum(one.nbytes for one in named.values())
    # Who updates the parameters has the optimizer's state from the servers, too, as long as what it pushes.
    return ServerTraffic(workers_of(config), servers, pushed, pushed if updates(config) else pulled)


def spread(state: State, world: World, mode: FakeTensorMode) -> None:
    """Give the ranks of a worker what its first rank has pulled."""
    if world.size > 1:
        with mode:
            FullParameters(world, state).spread()
