"""kopf hosts an engine: it begins when the engine is prepared, and the engine ends with it, whichever ends first."""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from disttrain_operator.host import EndlessBackoffs, Host
from disttrain_operator.kube.auth import Access
from disttrain_operator.kube.errors import AccessError
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import DISCOVERY, FakeApi, refusal
from tests.waiting import GENEROUS


class Engine:
    """An engine that records each call in `life`. `go_on` holds what a call does: it fails, or it waits."""

    def __init__(self) -> None:
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


async def hosted(api: FakeApi, engine: Engine) -> None:
    async with asyncio.timeout(GENEROUS):
        await Host(engine, Access(api.url)).run()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("during", ["prepare", "work"])
async def test_a_signal_ends_the_engine(
    api: FakeApi, number: int, during: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kopf")
    engine = Engine()
    engine.go_on[during] = asyncio.Event().wait
    running = asyncio.create_task(hosted(api, engine))
    await eventually(lambda: engine.life[-1:] == [during])
    signal.raise_signal(number)
    await running
    assert engine.life[-2:] == [f"{during} cancelled", "close"]
    assert "Hung tasks stopping is skipped: no tasks given" in caplog.text, "kopf waits five seconds for tasks"


async def test_what_ends_the_engine_ends_the_host(api: FakeApi) -> None:
    engine = Engine()
    engine.go_on["work"] = failing(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        await hosted(api, engine)
    assert engine.life == ["prepare", "work", "close"]


async def test_an_engine_that_cannot_be_prepared_never_works(api: FakeApi) -> None:
    engine = Engine()
    engine.go_on["prepare"] = failing(AccessError("the Secret holds no key"))
    with pytest.raises(AccessError, match="the Secret holds no key"):
        await hosted(api, engine)
    assert engine.life == ["prepare", "close"]


async def test_kopf_asks_for_the_kinds_alone(api: FakeApi) -> None:
    """No list, no watch, no finalizer, no annotation, no peering."""
    engine = Engine()
    running = asyncio.create_task(hosted(api, engine))
    await eventually(lambda: len(api.requests) >= len(DISCOVERY))
    await eventually(lambda: engine.life == ["prepare", "work"])
    signal.raise_signal(signal.SIGTERM)
    await running
    assert sorted(api.requests) == sorted(("GET", path) for path in DISCOVERY)


@pytest.mark.parametrize(("code", "reason"), [(401, "Unauthorized"), (403, "Forbidden"), (500, "InternalError")])
async def test_an_engine_works_while_kopf_is_refused(api: FakeApi, code: int, reason: str) -> None:
    api.refusals.append(lambda *_: refusal(code, reason))
    engine = Engine()
    running = asyncio.create_task(hosted(api, engine))
    await eventually(lambda: len(api.requests) >= 6)
    assert engine.life == ["prepare", "work"]
    api.refusals.clear()
    await eventually(lambda: ("GET", "/api/v1") in api.requests)
    assert engine.life == ["prepare", "work"]
    signal.raise_signal(signal.SIGTERM)
    await running


def test_back_offs_never_end_and_can_be_begun_again() -> None:
    backoffs = EndlessBackoffs()
    for _ in range(2):
        delays = [delay for _, delay in zip(range(1000), backoffs, strict=False)]
        assert len(delays) == 1000
        assert max(delays) <= 60
