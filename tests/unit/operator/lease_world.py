"""Replicas that take part in an election, and an API server that is slow or loses what it is asked: all in time that
passes when a test says so."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from disttrain_operator.kube.client import Client, Raw
from disttrain_operator.kube.errors import Conflict, NotFound
from disttrain_operator.kube.lease import Election
from tests.unit.operator.clocked_loop import ClockedLoop

STEP = 0.02
Way = Callable[[str], tuple[float, bool]]
"""How long a question of a replica, or its answer, is on its way now, and whether it arrives."""


class World:
    """Use as a context manager."""

    def __init__(self, way: Way = lambda replica: (0.01, True)) -> None:
        self.loop, self.way = ClockedLoop(), way
        self.elections = list[Election]()
        self.tasks = list[asyncio.Task[None]]()
        self.lease: Raw | None = None

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*self.tasks, return_exceptions=True))
        self.loop.close()

    def join(self, name: str, rate: float = 1.0, zero: float = 0.0) -> Election:
        """A replica whose clock runs at its own rate from its own zero."""
        client = cast("Client", _Wire(self, name))
        election = Election(client, "system", "lease", name, clock=lambda: zero + rate * self.now())
        self.elections.append(election)
        self.tasks.append(self.loop.create_task(election.run()))
        return election

    def kill(self, election: Election) -> None:
        """It gets no signal and gives nothing back."""
        self.tasks[self.elections.index(election)].cancel()

    def now(self) -> float:
        return self.loop.time()

    def until(self, condition: Callable[[], bool], seconds: float) -> float:
        """How long it takes until the condition holds, in steps; so many seconds where it never does."""
        began = self.now()
        while not condition() and self.now() - began < seconds:
            self.loop.pass_time(STEP)
        return self.now() - began


class _Wire:
    """What an election asks of a client."""

    def __init__(self, world: World, replica: str) -> None:
        self._world, self._replica = world, replica

    async def get(self, path: str) -> Raw:
        await self._travel()
        found = self._world.lease
        await self._travel()
        if found is None:
            raise NotFound(404, "NotFound", path)
        return found

    async def create(self, path: str, body: Raw) -> Raw:
        return await self._write(None, body)

    async def replace(self, path: str, body: Raw) -> Raw:
        return await self._write(body["metadata"]["resourceVersion"], body)

    async def _write(self, known: str | None, body: Raw) -> Raw:
        await self._travel()
        version = None if self._world.lease is None else self._world.lease["metadata"]["resourceVersion"]
        if known == version:
            made: dict[str, Any] = {**body["metadata"], "resourceVersion": str(int(version or 0) + 1)}
            self._world.lease = {**body, "metadata": made}
            answer = self._world.lease
        await self._travel()
        if known != version:
            raise Conflict(409, "Conflict", "another one was faster")
        return answer

    async def _travel(self) -> None:
        seconds, arrives = self._world.way(self._replica)
        await asyncio.sleep(seconds if arrives else 1e6)
