"""kopf is a guest: what it does to itself is nobody else's trouble."""

import asyncio
import json
from typing import Any

import kopf
import pytest

from disttrain_operator.handlers import KopfThread, ShortBackoffs, registry_of
from disttrain_operator.kube.auth import Access
from disttrain_operator.kube.shallow import MAX_BRACKETS, session
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import DEEP, FakeApi, refusal

ACCESS = Access("http://127.0.0.1:1")


async def test_kopf_is_started_again_whenever_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ends(**_: Any) -> None:
        raise RuntimeError("an answer that kopf does not survive")

    monkeypatch.setattr(kopf, "operator", ends)
    thread = KopfThread(ACCESS, (), lambda kind, raw: None)
    await eventually(lambda: thread.restarts >= 2)
    thread.stop()
    await asyncio.to_thread(thread.join, 20)


async def test_what_kopf_sees_arrives_in_our_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str | None, str, bool]] = []
    ours = asyncio.get_running_loop()

    async def one_event(*, registry: kopf.OperatorRegistry, stop_flag: asyncio.Event, **_: Any) -> None:
        (handler,) = registry._watching.get_all_handlers()
        await handler.fn(event={"type": "ADDED", "object": {"name": "job"}})  # type: ignore[call-arg, misc]
        await stop_flag.wait()

    def on_event(kind: str | None, raw: dict[str, Any]) -> None:
        seen.append((kind, raw["name"], asyncio.get_running_loop() is ours))

    monkeypatch.setattr(kopf, "operator", one_event)
    thread = KopfThread(ACCESS, (), on_event)
    await eventually(lambda: seen == [("ADDED", "job", True)])
    thread.stop()
    await asyncio.to_thread(thread.join, 20)
    assert thread.restarts == 1, "it ends when it is told to"


def test_handlers_leave_no_trace_on_jobs() -> None:
    """Only on.event: anything else would add finalizers, annotations and requests."""
    registry = registry_of(ACCESS, lambda kind, raw: None)
    assert len(list(registry._watching.get_all_handlers())) == 1
    assert not list(registry._changing.get_all_handlers())
    assert not list(registry._spawning.get_all_handlers())
    assert not list(registry._indexing.get_all_handlers())


def test_back_offs_never_end_and_can_be_begun_again() -> None:
    backoffs = ShortBackoffs()
    for _ in range(2):
        delays = [delay for _, delay in zip(range(1000), backoffs, strict=False)]
        assert len(delays) == 1000
        assert max(delays) <= 1


async def test_kopf_is_given_no_list_and_shallow_events_only(api: FakeApi) -> None:
    collection = "/apis/disttrain.io/v1alpha1/disttrainingjobs"
    jobs = "/apis/disttrain.io/v1alpha1/namespaces/team/disttrainingjobs"
    for number in range(3):
        await api.put(f"{jobs}/deep-{number}", spec=DEEP)
    async with session(Access(api.url)) as made:
        async with made.get(f"{api.url}{collection}?limit=1") as answer:
            version = api.version
            assert await answer.json() == {"metadata": {"resourceVersion": str(version)}, "items": []}
        await api.put(f"{jobs}/deep-0", spec=DEEP)
        await api.put(f"{jobs}/wide", spec=[{} for _ in range(MAX_BRACKETS)])
        await api.put(f"{jobs}/ordinary", spec={"workers": {"replicas": 2}})
        async with made.get(f"{api.url}{collection}?watch=true&resourceVersion={version}") as answer:
            chunks = answer.content.iter_chunked(2**20)
            event = json.loads(await anext(chunks))
    assert event["object"]["metadata"]["name"] == "ordinary"


async def test_kopf_hears_why_it_is_refused(api: FakeApi) -> None:
    api.refusals.append(lambda *_: refusal(403, "Forbidden", "the words"))
    async with session(Access(api.url)) as made, made.get(f"{api.url}/api/v1/pods?watch=true") as answer:
        assert (await answer.json())["message"] == "the words"
