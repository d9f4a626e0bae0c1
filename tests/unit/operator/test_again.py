"""What was left out for want of room is taken in by a list of its namespace, and of no other."""

import asyncio
from typing import Any

import pytest

from disttrain_operator.kube.again import SECONDS_BETWEEN, Again, Collection
from disttrain_operator.kube.budget import Budget
from disttrain_operator.kube.cache import Cache
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.informer import Informer
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi, refusal


def path(namespace: str | None) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


class Filled:
    """Two namespaces that have taken all they may, an informer, and what takes in again."""

    def __init__(self, api: FakeApi, client: Client) -> None:
        self.api, self.now = api, 0.0
        self.cache = Cache(group_of=lambda raw: "job", budget=Budget(40_000, 20_000), clock=lambda: self.now)
        self.slept: list[float] = []
        self.again = Again(client, [Collection(self.cache, path)], sleep=self._sleep)
        self.task = asyncio.create_task(Informer(client, "/api/v1/pods", self.cache).run())

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    async def put(self, namespace: str, name: str, size: int = 4_500) -> None:
        await self.api.put(f"{path(namespace)}/{name}", spec="x" * size)

    def left_out(self) -> list[str]:
        return sorted(f"{found.namespace}/{found.name}" for found in self.cache.unreadable())


@pytest.fixture
async def filled(api: FakeApi, client: Client) -> Any:
    for namespace in ("one", "two"):
        for number in range(4):
            await api.put(f"{path(namespace)}/p{number}", spec="x" * 4_500)
    made = Filled(api, client)
    await eventually(lambda: api.watches == 1)
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def test_it_is_not_asked_for_while_there_is_no_room(api: FakeApi, filled: Filled) -> None:
    assert filled.left_out() == ["one/p3", "two/p3"]
    lists = len(api.queries)
    await filled.again.once()
    assert len(api.queries) == lists


async def test_it_is_taken_in_when_something_was_deleted(api: FakeApi, filled: Filled) -> None:
    """Red where what is listed is not taken in, and where all namespaces are listed."""
    lists = api.asked("GET")
    await api.remove(f"{path('one')}/p0")
    await eventually(lambda: len(filled.cache.gone("job")) == 1)
    filled.now += 200
    await filled.again.once()
    assert filled.left_out() == ["two/p3"]
    assert api.asked("GET") == [*lists, path("one")], "one list of that namespace"
    await filled.again.once()
    assert len(api.asked("GET")) == len(lists) + 1


async def test_it_goes_on_where_the_list_is_refused_and_rests_between(api: FakeApi, filled: Filled) -> None:
    def refuse(method: str, asked: str, body: object) -> Any:
        return refusal(403, "Forbidden") if method == "GET" and filled.slept.count(SECONDS_BETWEEN) < 3 else None

    api.refusals.append(refuse)
    await filled.put("one", "p0", size=0)
    await eventually(filled.cache.with_room)
    task = asyncio.create_task(filled.again.run())
    await eventually(lambda: filled.left_out() == ["two/p3"])
    task.cancel()
    assert set(filled.slept) == {SECONDS_BETWEEN}
    assert api.asked("GET").count(path("one")) == 3
