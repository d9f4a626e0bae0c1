"""A fake API server, a client of it, and waiting on conditions."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from disttrain_operator.kube.auth import Access
from disttrain_operator.kube.client import Client
from tests.unit.operator.fake_api import FakeApi
from tests.unit.operator.gated_cluster import Cluster
from tests.unit.operator.looking_operator import Operator
from tests.waiting import GENEROUS


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as fake:
        yield fake


@pytest.fixture
async def client(api: FakeApi) -> AsyncIterator[Client]:
    made = Client(Access(api.url), retry_delays=(0.0, 0.01, 0.01, 0.01))
    yield made
    await made.close()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Two nodes behind a gate."""
    made = Cluster()
    made.node("a")
    made.node("b")
    yield made
    await made.close()


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    """One that looks at one job when the test lets time pass."""
    made = Operator(monkeypatch)
    yield made
    made.close()


async def eventually(condition: Callable[[], object]) -> None:
    """Returns when the condition holds; fails long after it should."""
    async with asyncio.timeout(GENEROUS):
        while not condition():  # noqa: ASYNC110 - conditions of any kind, nobody sets an event
            await asyncio.sleep(0.005)
