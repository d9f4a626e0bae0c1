"""kopf hosts an engine: it begins when the engine is prepared, and the engine ends with it, whichever ends first."""

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest

from disttrain_operator.host import Host
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import AccessError
from disttrain_operator.kube.kopf_session import KopfSession
from disttrain_operator.kube.kopf_watch import KopfWatch
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi
from tests.unit.operator.followed import EVERYWHERE, KOPF, TEAM, following, loop_of
from tests.unit.operator.test_informer import a_cache, contents, truth
from tests.waiting import GENEROUS


class Silent:
    """A client whose server never answers."""

    async def read(self, *_: object, **__: object) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError


class Engine:
    """An engine that records each call in `life`. `go_on` holds what a call does: it fails, or it waits."""

    def __init__(self) -> None:
        self.jobs = [KopfWatch(cast(Client, Silent()), EVERYWHERE, a_cache())]
        self.life: list[str] = []
        self.go_on: dict[str, Callable[[], Any]] = {}

    async def prepare(self) -> None:
        await self._do("prepare")

    async def work(self) -> None:
        await self._do("work")
        await asyncio.Event().wait()

    async def close(self) -> None:
        if self.life[-1:] != ["close"]:
            self.life.append("close")

    async def _do(self, what: str) -> None:
        self.life.append(what)
        try:
            if what in self.go_on:
                await self.go_on[what]()
        except asyncio.CancelledError:
            self.life.append(f"{what} cancelled")
            raise


@pytest.fixture(autouse=True)
def _signals_end_no_tests() -> Iterator[None]:
    """One that the host does not take fails its test, and does not end all of them."""
    former = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def failing(error: Exception) -> Callable[[], Any]:
    async def fail() -> None:
        raise error

    return fail


async def hosted(engine: Engine) -> None:
    async with asyncio.timeout(GENEROUS):
        await Host(engine).run()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("during", ["prepare", "work"])
async def test_a_signal_ends_the_engine(number: int, during: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kopf")
    engine = Engine()
    engine.go_on[during] = asyncio.Event().wait
    running = asyncio.create_task(hosted(engine))
    await eventually(lambda: engine.life[-1:] == [during])
    signal.raise_signal(number)
    await running
    assert engine.life[-2:] == [f"{during} cancelled", "close"]
    assert "Hung tasks stopping is skipped: no tasks given" in caplog.text, "kopf waits five seconds for tasks"


async def test_what_ends_the_engine_ends_the_host() -> None:
    engine = Engine()
    engine.go_on["work"] = failing(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        await hosted(engine)
    assert engine.life == ["prepare", "work", "close"]


async def test_an_engine_that_cannot_be_prepared_never_works() -> None:
    engine = Engine()
    engine.go_on["prepare"] = failing(AccessError("the Secret holds no key"))
    with pytest.raises(AccessError, match="the Secret holds no key"):
        await hosted(engine)
    assert engine.life == ["prepare", "close"]


async def test_kopf_lists_and_watches_jobs_and_asks_for_nothing_else(api: FakeApi, client: Client) -> None:
    """No kinds, no finalizer, no annotation, no peering, no Events."""
    await api.put(f"{TEAM}/a")
    async with following(KOPF, client, a_cache()) as (watch,):
        await eventually(lambda: api.watches == 1)
        await api.put(f"{TEAM}/a", spec=1)
        await eventually(lambda: watch.cache.progress() == api.version)
        await api.remove(f"{TEAM}/a")
        await eventually(lambda: not len(watch.cache))
    assert api.requests == [("GET", EVERYWHERE), ("WATCH", EVERYWHERE)]


async def test_kopf_receives_of_an_event_which_object_it_is_about(api, client, monkeypatch):
    """Red where it is handed anything else of the object."""
    received = list[Any]()
    plainly = KopfWatch.events

    async def events(self: KopfWatch) -> AsyncIterator[bytes]:
        async for line in plainly(self):
            received.append(json.loads(line))
            yield line

    monkeypatch.setattr(KopfWatch, "events", events)
    async with following(KOPF, client, a_cache()) as (watch,):
        await eventually(lambda: api.watches == 1)
        await api.put(f"{TEAM}/a", spec={"large": "x" * 1000}, labels={"mine": "1"})
        await eventually(lambda: watch.cache.progress() == api.version)
    (event,) = received
    assert event["object"].keys() == {"metadata"}
    assert event["object"]["metadata"].keys() == {"namespace", "name", "uid", "resourceVersion"}


async def test_no_job_is_seen_without_a_handler(api: FakeApi, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    await api.put(f"{TEAM}/a")
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def deaf(self: Host, **_: object) -> None:
        loop.call_soon_threadsafe(asked.set)

    monkeypatch.setattr(Host, "_job_changed", deaf)
    async with following(KOPF, client, a_cache()) as (watch,):
        await asked.wait()
        assert len(watch.cache) == 0
        assert not watch.synced
        assert api.watches == 0, "the watch begins when the list is taken"


async def test_kopf_makes_no_request_but_its_watches() -> None:
    """Red where any request for the path of a watch is answered."""
    session = KopfSession({EVERYWHERE: cast(KopfWatch, None)})
    for method, path in (("patch", f"{TEAM}/a"), ("get", "/api/v1/pods"), ("post", EVERYWHERE)):
        with pytest.raises(ValueError, match=f"kopf asks for {method} {path}"):
            await session.request(method=method, url=f"https://jobs{path}")


async def test_who_catches_up_has_kopf_list_anew(api: FakeApi, client: Client) -> None:
    await api.put(f"{TEAM}/a")
    await api.put(f"{TEAM}/b")
    async with following(KOPF, client, a_cache()) as (watch,):
        await eventually(lambda: api.watches == 1)
        changed = list[str]()
        watch.cache.on_change = lambda group, raw: changed.append(raw["metadata"]["name"])
        await api.fault("silent")
        await api.put(f"{TEAM}/b", spec=1)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(watch.catch_up(), loop_of(watch)))
        assert contents(watch.cache) == truth(api)
        assert changed == ["b"], "what is known as it is goes through no handler"
        assert watch.lists == 2
