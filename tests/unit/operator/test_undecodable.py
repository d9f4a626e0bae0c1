"""An object that cannot be decoded costs nobody anything: lists, watches and the reconciler step over it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from disttrain_operator.kube import large_events, lists
from disttrain_operator.kube import watch as watches
from disttrain_operator.kube.cache import Cache
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import TooLarge, Undecodable
from disttrain_operator.kube.lists import Page, list_pages
from disttrain_operator.kube.tolerant import Unreadable
from disttrain_operator.kube.watch import Watch
from disttrain_operator.preflight import wait_for_jobs
from disttrain_operator.snapshot import job_collection
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import DEEP, FakeApi, refusal
from tests.unit.operator.followed import BOTH, EVERYWHERE, TEAM, following
from tests.unit.operator.test_informer import contents, truth
from tests.waiting import GENEROUS


def names(page: Page) -> tuple[list[str], list[str]]:
    return [raw["metadata"]["name"] for raw in page.objects], [found.name for found in page.unreadable]


def unreadable(cache: Cache) -> dict[str, int]:
    return {found.name: found.version for found in cache.unreadable()}


def a_cache(**others: Any) -> Cache:
    return Cache(group_of=lambda raw: "all", **others)


class Watched:
    """A watch that runs, and all that its cache was given."""

    def __init__(self, watch: Watch, clock: list[float]) -> None:
        self.informer, self.cache, self.clock = watch, watch.cache, clock
        self.reported: list[Unreadable] = []
        self.cache.on_unreadable = self.reported.append

    async def caught_up(self, api: FakeApi, *left_out: str) -> None:
        """Returns when all but these objects are in the cache in their newest version."""

        def holds() -> bool:
            there, wanted = contents(self.cache), truth(api)
            return all(there.get(name) == wanted[name] for name in wanted.keys() - set(left_out)) and (
                there.keys() <= wanted.keys()
            )

        await eventually(holds)


@asynccontextmanager
async def watching(by: str, client: Client, cache: Cache) -> AsyncIterator[Watched]:
    clock = [0.0]
    async with following(by, client, cache, clock=lambda: clock[0]) as (watch,):
        yield Watched(watch, clock)


@pytest.fixture(params=BOTH)
async def watched(request: pytest.FixtureRequest, api: FakeApi, client: Client) -> AsyncIterator[Watched]:
    for name in "abc":
        await api.put(f"{TEAM}/{name}")
    async with watching(request.param, client, a_cache()) as made:
        await eventually(lambda: api.watches == 1)
        yield made


# --- lists ---


@pytest.mark.parametrize("chunk", [1, 2, 500])
@pytest.mark.parametrize("bad", ["a", "c", "e", "abcde", "bd"])
async def test_a_list_steps_over_what_cannot_be_decoded(api: FakeApi, client: Client, bad: str, chunk: int) -> None:
    for name in "abcde":
        await api.put(f"{TEAM}/{name}", spec=DEEP if name in bad else {})
    pages = [page async for page in list_pages(client, EVERYWHERE, {}, chunk)]
    good = [name for name in "abcde" if name not in bad]
    assert [name for page in pages for name in names(page)[0]] == good
    assert [name for page in pages for name in names(page)[1]] == list(bad)
    assert {page.version for page in pages} == {api.version}
    assert len(api.queries) == -(-5 // chunk), "no request more than there are pages"
    found = next(found for page in pages for found in page.unreadable)
    raw = api.objects[f"{TEAM}/{found.name}"]["metadata"]
    assert (found.uid, found.version, found.namespace) == (raw["uid"], int(raw["resourceVersion"]), "team")
    assert "nests too deep" in found.why


async def test_a_page_that_is_too_large_is_asked_for_in_smaller_ones(api: FakeApi, client: Client) -> None:
    for number in range(20):
        await api.put(f"{TEAM}/p{number:02}", spec="x" * 1000)
    pages = [page async for page in list_pages(client, EVERYWHERE, {}, chunk=16, max_page_bytes=5000)]
    assert [name for page in pages for name in names(page)[0]] == [f"p{number:02}" for number in range(20)]
    assert max(len(page.objects) for page in pages) <= 4
    assert len(api.queries) < 20, "pages grow again"


async def test_of_an_object_that_is_too_large_the_metadata_is_read(api, client, monkeypatch):
    monkeypatch.setattr(lists, "MAX_OBJECT_BYTES", 2000)
    for name in "abc":
        await api.put(f"{TEAM}/{name}", spec="x" * 5000 if name == "b" else "")
    pages = [page async for page in list_pages(client, EVERYWHERE, {}, chunk=3, max_page_bytes=2000)]
    assert [name for page in pages for name in names(page)[0]] == ["a", "c"]
    assert [name for page in pages for name in names(page)[1]] == ["b"]
    assert "larger than" in next(found.why for page in pages for found in page.unreadable)


@pytest.mark.parametrize("by", BOTH)
@pytest.mark.parametrize("odd", [{"uid": 7}, {"uid": None}, {"resourceVersion": "new"}, {"uid": ["u"]}, "metadata"])
async def test_an_object_of_an_odd_shape_is_left_out_alone(api: FakeApi, client: Client, odd: Any, by: str) -> None:
    for name in "ab":
        await api.put(f"{TEAM}/{name}")
    raw = await api.put(f"{TEAM}/odd")
    api.objects[f"{TEAM}/odd"]["metadata"] = raw["metadata"] | odd if isinstance(odd, dict) else odd
    async with watching(by, client, a_cache()) as watched:
        await eventually(lambda: api.watches == 1)
        assert sorted(contents(watched.cache)) == ["a", "b"]


@pytest.mark.parametrize("by", BOTH)
async def test_an_object_that_the_cache_refuses_is_left_out_alone(api: FakeApi, client: Client, by: str) -> None:
    def trim(raw: dict[str, Any]) -> dict[str, Any]:
        raw["spec"]["replicas"] += 1
        return raw

    for name in "ab":
        await api.put(f"{TEAM}/{name}", spec={"replicas": 1})
    await api.put(f"{TEAM}/odd", spec=None)
    async with watching(by, client, a_cache(trim=trim)) as watched:
        await watched.caught_up(api, "odd")
        await api.put(f"{TEAM}/a", spec=None)
        await api.put(f"{TEAM}/c", spec={"replicas": 1})
        await watched.caught_up(api, "odd", "a")
        assert sorted(unreadable(watched.cache)) == ["a", "odd"]
        assert watched.informer.lists == 1


# --- watches ---


async def test_a_watch_steps_over_what_cannot_be_decoded(api: FakeApi, watched: Watched) -> None:
    """Red where the error leaves the watch."""
    await api.put(f"{TEAM}/bad", spec=DEEP)
    await api.put(f"{TEAM}/d")
    await watched.caught_up(api, "bad")
    assert unreadable(watched.cache) == {"bad": api.version - 1}
    assert (watched.informer.lists, api.watches) == (1, 1)
    assert watched.cache.progress() == api.version


async def test_an_object_that_is_changed_all_the_time_costs_no_list(api: FakeApi, watched: Watched) -> None:
    """Red where an object that cannot be decoded makes everything be listed again."""
    for number in range(100):
        await api.put(f"{TEAM}/bad", spec=DEEP)
        await api.put(f"{TEAM}/good", spec=number)
        watched.clock[0] += 60
    await watched.caught_up(api, "bad")
    assert (watched.informer.lists, api.watches) == (1, 1)


async def test_a_new_watch_does_not_begin_before_what_was_stepped_over(api: FakeApi, watched: Watched) -> None:
    await api.put(f"{TEAM}/bad", spec=DEEP)
    await eventually(lambda: unreadable(watched.cache))
    await api.fault("close")
    await eventually(lambda: api.watches == 2)
    await api.put(f"{TEAM}/d")
    await watched.caught_up(api, "bad")
    assert len(watched.reported) == 1
    assert watched.informer.lists == 1


async def test_events_that_do_not_say_of_what_cost_few_lists(api, watched, monkeypatch):
    """Nothing of them can be seen within the work that an event is worth."""
    monkeypatch.setattr(watches, "MAX_TOKENS", 3)
    for _ in range(10):
        await api.put(f"{TEAM}/bad", spec=DEEP)
    await api.put(f"{TEAM}/d")
    await watched.caught_up(api, "bad")
    assert (watched.informer.lists, unreadable(watched.cache)) == (1, {})
    watched.clock[0] += watches.RELIST_SECONDS
    await api.put(f"{TEAM}/bad", spec=DEEP)
    await eventually(lambda: watched.informer.lists == 2)
    assert list(unreadable(watched.cache)) == ["bad"]
    for _ in range(10):
        await api.put(f"{TEAM}/bad", spec=DEEP)
    await api.put(f"{TEAM}/e")
    await watched.caught_up(api, "bad")
    assert watched.informer.lists == 2


async def test_a_line_longer_than_an_object_may_be_is_stepped_over(api, watched, monkeypatch):
    for module in (watches, large_events):
        monkeypatch.setattr(module, "MAX_OBJECT_BYTES", 100_000)
    await api.put(f"{TEAM}/bad", spec="x" * 1_000_000)
    await api.put(f"{TEAM}/d")
    await watched.caught_up(api, "bad")
    await eventually(lambda: list(unreadable(watched.cache)) == ["bad"])
    assert "larger than" in watched.reported[0].why


# --- what becomes of an object ---


async def test_what_becomes_unreadable_stays_until_it_can_be_read_again(api: FakeApi, watched: Watched) -> None:
    uid = api.objects[f"{TEAM}/a"]["metadata"]["uid"]
    await api.put(f"{TEAM}/a", spec=DEEP)
    await eventually(lambda: watched.cache.is_unreadable(uid))
    assert watched.cache.get(uid) is not None
    assert watched.cache.gone("all") == []
    await api.put(f"{TEAM}/a", spec={})
    await watched.caught_up(api)
    assert not watched.cache.is_unreadable(uid)


async def test_a_list_does_not_take_what_it_cannot_read_for_deleted(api: FakeApi, watched: Watched) -> None:
    uid = api.objects[f"{TEAM}/a"]["metadata"]["uid"]
    await api.fault("close")
    await api.put(f"{TEAM}/a", spec=DEEP)
    api.compact()
    await eventually(lambda: watched.informer.lists == 2)
    assert watched.cache.is_unreadable(uid)
    assert watched.cache.get(uid) is not None
    assert watched.cache.gone("all") == []


@pytest.mark.parametrize("way", ["watch", "list"])
async def test_the_deletion_of_what_cannot_be_read_is_seen(api: FakeApi, watched: Watched, way: str) -> None:
    uid = api.objects[f"{TEAM}/a"]["metadata"]["uid"]
    for name in ("a", "bad"):
        await api.put(f"{TEAM}/{name}", spec=DEEP)
    await eventually(lambda: len(watched.cache.unreadable()) == 2)
    if way == "list":
        api.watch_answers.append(refusal(503, "ServiceUnavailable"))
        await api.fault("close")
    for name in ("a", "bad"):
        await api.remove(f"{TEAM}/{name}")
    if way == "list":
        api.compact()
    await eventually(lambda: not watched.cache.unreadable())
    assert watched.cache.get(uid) is None
    await watched.caught_up(api)
    assert watched.informer.lists == (2 if way == "list" else 1)


# --- single answers ---


async def test_an_answer_that_cannot_be_decoded_is_not_asked_for_again(api: FakeApi, client: Client) -> None:
    await api.put(f"{TEAM}/bad", spec=DEEP)
    with pytest.raises(Undecodable, match="cannot be decoded"):
        await client.get(f"{TEAM}/bad")
    assert len(api.asked("GET")) == 1


async def test_an_answer_is_read_up_to_its_bound(api: FakeApi, client: Client) -> None:
    """Red where all of it is read."""
    await api.put(f"{TEAM}/large", spec="x" * 10_000)
    with pytest.raises(TooLarge, match="larger than 5000 bytes"):
        await client.read(f"{TEAM}/large", {}, 5000)
    assert len(api.asked("GET")) == 1
    assert len(await client.read(f"{TEAM}/large", {}, 20_000)) > 10_000


async def test_waiting_for_jobs_ends_where_the_first_cannot_be_decoded(api, client, caplog):
    await api.put(f"{job_collection('team')}/bad", spec=DEEP)
    async with asyncio.timeout(GENEROUS):
        await wait_for_jobs(client, None)
    assert caplog.text == ""
