"""The cache becomes equal to the server, whatever happens to the stream."""

from collections.abc import AsyncIterator

import pytest

from disttrain_operator.kube.cache import Cache
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.watch import Watch
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi, refusal
from tests.unit.operator.followed import BOTH, EVERYWHERE, TEAM, following


def a_cache() -> Cache:
    return Cache(group_of=lambda raw: "all")


def contents(cache: Cache) -> dict[str, str]:
    return {raw["metadata"]["name"]: raw["metadata"]["resourceVersion"] for raw in cache.group("all")}


def truth(api: FakeApi) -> dict[str, str]:
    return {raw["metadata"]["name"]: raw["metadata"]["resourceVersion"] for raw in api.objects.values()}


@pytest.fixture(params=BOTH)
async def informer(request: pytest.FixtureRequest, api: FakeApi, client: Client) -> AsyncIterator[Watch]:
    await api.put(f"{TEAM}/a")
    await api.put(f"{TEAM}/b")
    async with following(request.param, client, a_cache(), silence=0.3, chunk=1) as (made,):
        await eventually(lambda: made.synced and api.watches == 1)
        yield made


async def test_list_then_events(api: FakeApi, informer: Watch) -> None:
    assert contents(informer.cache) == truth(api)
    await api.put(f"{TEAM}/c")
    await api.put(f"{TEAM}/a", status={"phase": "Running"})
    await api.remove(f"{TEAM}/b")
    await eventually(lambda: contents(informer.cache) == truth(api))
    assert api.asked("GET") == [EVERYWHERE] * 2, "two pages at the start and no list after"
    assert [raw["metadata"]["name"] for raw in informer.cache.gone("all")] == ["b"]


@pytest.mark.parametrize(
    ("fault", "listed"),
    [
        ("close", False),
        ("reset", False),
        ("silent", False),
        ("half-line", False),
        ("garbage", False),
        ("error:410", True),
        ("error:500", True),
    ],
)
async def test_the_cache_catches_up_after_a_fault(api: FakeApi, informer: Watch, fault: str, listed: bool) -> None:
    lists = len(api.asked("GET"))
    await api.fault(fault)
    await api.put(f"{TEAM}/c")
    await api.remove(f"{TEAM}/a")
    await eventually(lambda: api.watches >= 2)
    await api.put(f"{TEAM}/d")
    await eventually(lambda: contents(informer.cache) == truth(api))
    assert (len(api.asked("GET")) > lists) is listed


async def test_a_deletion_in_a_hole_of_history_is_seen_as_one(api: FakeApi, informer: Watch) -> None:
    api.watch_answers += [refusal(503, "ServiceUnavailable")] * 2
    await api.fault("close")
    await api.remove(f"{TEAM}/a")
    await api.put(f"{TEAM}/c")
    api.compact()
    await eventually(lambda: contents(informer.cache) == truth(api))
    assert [raw["metadata"]["name"] for raw in informer.cache.gone("all")] == ["a"]


@pytest.mark.parametrize("code", [400, 403, 404, 410, 429, 500, 504])
async def test_refused_watches_do_not_end_the_informer(api: FakeApi, informer: Watch, code: int) -> None:
    """Red where a failed list reaches kopf."""
    api.watch_answers += [refusal(code, "Refused", headers={"Retry-After": "0.01"})] * 3
    await api.fault("close")
    await api.put(f"{TEAM}/c")
    await eventually(lambda: contents(informer.cache) == truth(api))


async def test_refused_lists_do_not_end_the_informer(api: FakeApi, informer: Watch) -> None:
    def no_lists(method: str, path: str, body: object) -> object:
        return refusal(403, "Forbidden") if method == "GET" and refusing else None

    refusing = [True]
    api.refusals.append(no_lists)  # type: ignore[arg-type]
    await api.fault("error:410")
    await eventually(lambda: len(api.asked("GET")) > 4)
    await api.remove(f"{TEAM}/a")
    refusing.clear()
    await eventually(lambda: contents(informer.cache) == truth(api))


async def test_lines_longer_than_any_buffer_are_read(api: FakeApi, informer: Watch) -> None:
    await api.put(f"{TEAM}/long", spec={"text": "x" * 1_000_000})
    await eventually(lambda: contents(informer.cache) == truth(api))
