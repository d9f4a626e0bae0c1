"""The ranks of a pod as one worker: they share tasks and sum their gradients; their first rank talks to the servers.

Such a group has a process group of its own, in which the trainer works as in any other layout, and which no other
group's death concerns. Its ranks meet in a file of the pod, which needs no port.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn

from disttrain_agent.environment import meeting_file
from disttrain_api.names import Env
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.parameter_server.protocol.placement import Placement
from disttrain_trainer.parameter_server.protocol.settings import group_mesh
from disttrain_trainer.parameter_server.protocol.tasks import Result, Task
from disttrain_trainer.parameter_server.protocol.wire import Message
from disttrain_trainer.parameter_server.worker.client import Answer, Servers, Welcome
from disttrain_trainer.parameter_server.worker.full_parameters import FullParameters, States
from disttrain_trainer.parameter_server.worker.payload import Payload
from disttrain_trainer.parameter_server.worker.pulling import Pulled
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World

T = TypeVar("T")

# The first rank may wait for the servers as long as they live, and the others wait for it.
_PATIENCE = timedelta(days=1000)


def in_group(config: Config) -> Config:
    """The config of the world of this rank's group. Raises InvalidConfiguration where its ranks cannot meet."""
    mesh = group_mesh(config)
    alone = mesh.world_size == 1
    if config.report_dir is None and not alone:
        raise InvalidConfiguration(f"{Env.REPORT_DIR} is not set, but the ranks of a pod meet in it as one worker")
    store_file = None if alone or config.report_dir is None else meeting_file(config.report_dir)
    rank = config.rank % mesh.world_size
    return replace(config, rank=rank, world_size=mesh.world_size, mesh=mesh, store_file=store_file)


@dataclass
class GroupPushing:
    """A push of a group that has not begun."""

    task: Task
    weight: float
    pulled: Pulled
    floor: int

    def ready(self, name: str) -> None:
        """A rank's gradient is complete, the group's is not."""

    def skip(self) -> None:
        """It is not to count."""
        self.weight = 0.0


class GroupPulling(NamedTuple):
    """A pull of a group that is complete."""

    pulled: Pulled
    waits_for: tuple[str, ...] = ()

    def need(self, name: str) -> None:
        """It is there."""

    def rest(self) -> None:
        """All are there."""


class GroupServers:
    """The servers as the ranks of a group see them: as Servers, but every method is a collective call of the group.

    A TrainerError of the first rank is raised on every rank.
    """

    def __init__(
        self, world: World, full_parameters: FullParameters, connect: Callable[[dict[str, nn.Parameter]], Servers]
    ) -> None:
        """`connect`: to the servers of these parameters; called on the first rank."""
        self._world, self._full_parameters = world, full_parameters
        self._waiting = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._servers = connect(dict(full_parameters.whole)) if world.first else None
        self.lost: list[int] = []
        """As of Servers."""
        self.pulled_bytes = 0
        """Bytes of the parameters that the first rank has pulled."""

    @property
    def placement(self) -> Placement:
        """Placement of Servers; known on the first rank."""
        return () if self._servers is None else self._servers.placement

    def hello(self, samples: int) -> Welcome:
        return self._first(lambda servers: servers.hello(samples), Welcome)

    def load(self, states: States) -> None:
        """`states`: this rank's part of the optimizer's."""
        whole = self._full_parameters.gather(states)
        self._first(lambda servers: servers.load(whole))

    def start(self, step: int, cursor: Cursor, hold_at: int, skipped: int = 0) -> None:
        self._first(lambda servers: servers.start(step, cursor, hold_at, skipped))

    def next(self, done: tuple[Task, Result] | None = None, hold_at: int | None = None) -> Answer:
        return self._first(lambda servers: servers.next(done, hold_at), Answer)

    def begin_pull(self, complete: int = 0, *, whole: bool = False) -> GroupPulling:
        """Pull for all ranks together, complete on return: the first rank's parameters are broadcast as a whole."""

        def pull(servers: Servers) -> tuple[Pulled, list[int], int]:
            return servers.pull(complete, whole=whole), servers.lost, servers.pulled_bytes

        pulled, self.lost, self.pulled_bytes = self._first(pull, tuple[Pulled, list[int], int])
        self._full_parameters.spread()
        return GroupPulling(pulled)

    def begin_push(self, task: Task, weight: float, pulled: Pulled, floor: int, payload: Payload) -> GroupPushing:
        """Return the push, whose payload follows when the group's gradients have been assembled."""
        return GroupPushing(task, weight, pulled, floor)

    def end_push(self, pushing: GroupPushing, payload: Payload) -> int:
        """The gradients of the group's ranks, once; `payload`: of the first rank. Returns the bytes that it sends."""
        self._full_parameters.gather_gradients()
        task, weight, pulled, floor = pushing.task, pushing.weight, pushing.pulled, pushing.floor
        sent = self._first(lambda servers: servers.push(task, weight, pulled, floor, payload), int)
        self._full_parameters.drop_gradients()
        return sent

    def fetch(self) -> States:
        """This rank's part of the optimizer's state."""
        found: list[States] = []
        self._first(lambda servers: found.append(servers.fetch()))
        return self._full_parameters.spread_states(found[0] if found else {})

    def figures(self) -> list[Message]:
        fields = self._first(lambda servers: [dict(one.fields) for one in servers.figures()], list[dict[str, Any]])
        return [Message("figures", one) for one in fields]

    def finish(self) -> None:
        self._first(lambda servers: servers.finish())

    def close(self) -> None:
        """Not collective: a rank may be gone."""
        if self._servers is not None:
            self._servers.close()

    def _first(self, ask: Callable[[Servers], T], kind: Any = None) -> T:
        def work() -> T:
            assert self._servers is not None
            return ask(self._servers)

        return self._world.from_first(work, kind, self._waiting)
