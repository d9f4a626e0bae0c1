"""Events of much text are read beside the loop, the newest of each object alone, and cost no other its turn."""

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_operator.kube import large_events
from disttrain_operator.kube.cache import Cache
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.identity import event_identity
from disttrain_operator.kube.large_events import LargeEvents
from disttrain_operator.kube.sizes import LARGE_BYTES
from disttrain_operator.kube.tolerant import Unreadable, refused
from disttrain_operator.kube.watch import Watch
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi
from tests.unit.operator.followed import BOTH, TEAM, following
from tests.unit.operator.test_informer import contents, truth

Raw = dict[str, Any]
TEXT = "x" * (LARGE_BYTES + 1)


def an_event(uid: str, version: int, namespace: str = "team", kind: str = "MODIFIED", **fields: Any) -> bytes:
    metadata = {"name": uid, "namespace": namespace, "resourceVersion": str(version), "uid": uid}
    return json.dumps({"type": kind, "object": {"kind": "Pod", "metadata": metadata, "spec": TEXT, **fields}}).encode()


class Reader:
    """Trims objects, once it may."""

    def __init__(self, **how: Any) -> None:
        self.go_on, self.threads = threading.Event(), set[int]()
        self.read: list[str] = []
        self.taken: list[tuple[str, str]] = []
        self.left_out: list[tuple[str, Unreadable | None]] = []
        self.events = LargeEvents(
            self._trim, refused, self._take, lambda kind, found: self.left_out.append((kind, found)), **how
        )

    def _trim(self, raw: Raw) -> Raw:
        self.go_on.wait()
        self.threads.add(threading.get_ident())
        self.read.append(raw["metadata"]["uid"])
        if raw["spec"] is None:
            raise ValueError("odd")
        return {"metadata": raw["metadata"]}

    def _take(self, kind: str, kept: Raw) -> None:
        self.taken.append((kept["metadata"]["uid"], kept["metadata"]["resourceVersion"]))

    async def put(self, *lines: bytes) -> None:
        for line in lines:
            assert await self.events.put(line)

    async def end(self) -> None:
        self.go_on.set()
        await self.events.taken()


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    made = Reader()
    yield made
    made.go_on.set()
    made.events.close()


async def test_of_an_object_that_changes_all_the_time_the_newest_is_read(reader: Reader) -> None:
    """Red where the event that waits stays and the newer one goes. Where the loop reads, it never ends."""
    await reader.put(an_event("a", 1))
    await eventually(lambda: reader.events._reading)
    await reader.put(*(an_event("a", version) for version in range(2, 50)))
    await reader.end()
    assert reader.taken == [("a", "1"), ("a", "49")]
    assert threading.get_ident() not in reader.threads


async def test_which_object_an_event_is_about_is_found_beside_the_loop(reader, monkeypatch):
    """Red where the loop goes through the text itself."""
    threads = []

    def identity(line: bytes, why: str) -> Any:
        threads.append(threading.get_ident())
        return event_identity(line, why)

    monkeypatch.setattr(large_events, "event_identity", identity)
    await reader.put(an_event("a", 1))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_namespaces_take_turns(reader: Reader) -> None:
    """Red where all events stand in one line."""
    await reader.put(*(an_event(f"many{number}", number + 1, "many") for number in range(10)))
    await reader.put(an_event("few", 20, "few"))
    await reader.end()
    assert reader.read.index("few") <= 2


async def test_events_of_little_text_and_what_is_no_event_are_left_to_the_caller(reader: Reader) -> None:
    assert not await reader.events.put(an_event("a", 1).replace(TEXT.encode(), b""))
    assert not await reader.events.put(json.dumps({"type": "ERROR", "object": {"message": TEXT}}).encode())
    assert not await reader.events.put(json.dumps({"type": "BOOKMARK", "object": {"metadata": {"a": TEXT}}}).encode())


async def test_what_is_dropped_is_not_taken_also_where_it_is_being_read(reader: Reader) -> None:
    await reader.put(an_event("a", 1), an_event("b", 2), an_event("c", 3))
    await eventually(lambda: reader.events._reading)
    reader.events.drop("a")
    reader.events.drop("b")
    await reader.end()
    assert reader.taken == [("c", "3")]


async def test_what_a_list_has_brought_is_dropped(reader: Reader) -> None:
    await reader.put(an_event("a", 1), an_event("b", 2), an_event("c", 3))
    reader.events.drop_until(2)
    await reader.end()
    assert reader.taken == [("c", "3")]


async def test_what_cannot_be_taken_in_is_stepped_over(reader: Reader) -> None:
    odd = an_event("odd", 7, spec=None, text=TEXT)
    await reader.put(odd, an_event("cut", 8)[:-10], an_event("good", 9))
    await reader.end()
    assert reader.taken == [("good", "9")]
    assert {found.name: found.version for _, found in reader.left_out if found} == {"odd": 7, "cut": 8}


async def test_where_too_much_waits_the_namespace_that_has_most_gives_way() -> None:
    reader = Reader(most=5 * len(an_event("a", 1)))
    await reader.put(an_event("few", 1, "few"))
    await eventually(lambda: reader.events._reading)
    await reader.put(*(an_event(f"many{number}", number + 10, "many") for number in range(20)))
    await reader.put(an_event("few1", 40, "few"), an_event("few2", 41, "few"))
    await reader.end()
    assert {uid for uid, _ in reader.taken} >= {"few", "few1", "few2"}
    left_out = [found for _, found in reader.left_out if found is not None]
    assert {found.namespace for found in left_out} == {"many"}
    assert all(found.needs and "change faster" in found.why for found in left_out)
    assert len(reader.taken) + len(left_out) == 23
    reader.events.close()


# --- in a watch ---


@pytest.fixture(params=BOTH)
async def informer(request: pytest.FixtureRequest, api: FakeApi, client: Client) -> AsyncIterator[Watch]:
    await api.put(f"{TEAM}/a")
    cache = Cache(group_of=lambda raw: "all", gone_seconds=0)
    async with following(request.param, client, cache) as (made,):
        await eventually(lambda: api.watches == 1)
        yield made


async def test_the_cache_is_the_server_whatever_is_large(api: FakeApi, informer: Watch) -> None:
    for number in range(20):
        await api.put(f"{TEAM}/p{number % 4}", spec=TEXT if number % 3 else "", status=number)
    for name in ("p1", "p2"):
        await api.remove(f"{TEAM}/{name}")
    await eventually(lambda: contents(informer.cache) == truth(api))
    assert informer.lists == 1
    assert informer.cache.progress() == api.version


async def test_what_was_deleted_meanwhile_does_not_come_back(api: FakeApi, informer: Watch) -> None:
    """Nothing is remembered of deleted objects here, so that nothing else keeps it away."""
    go_on = threading.Event()
    trim = informer.cache.trimmed

    def slow(raw: Raw) -> Raw:
        if raw["metadata"]["name"] == "late":
            go_on.wait()
        return trim(raw)

    informer._large._trim = slow
    await api.put(f"{TEAM}/late", spec=TEXT)
    await eventually(lambda: informer._large._reading)
    api.objects[f"{TEAM}/late"]["spec"] = ""
    await api.remove(f"{TEAM}/late")
    await api.put(f"{TEAM}/b")
    await eventually(lambda: "b" in contents(informer.cache))
    go_on.set()
    await api.put(f"{TEAM}/c", spec=TEXT)
    await eventually(lambda: contents(informer.cache) == truth(api))


# --- which object an event is about ---

NAMES = st.sampled_from(["uid", "name", "namespace", "resourceVersion", "a", "metadata", 'odd "\\'])
PLAIN = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=5) | NAMES
KEYS = NAMES | st.text(max_size=3)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=10
)
OTHERS = st.dictionaries(st.sampled_from(["annotations", "labels", "managedFields", "ownerReferences", "zzz"]), VALUES)


@given(others=OTHERS, indent=st.sampled_from([None, 1]), ascii_only=st.booleans(), in_order=st.booleans())
def test_the_object_of_an_event_is_that_of_its_metadata(others, indent, ascii_only, in_order):
    own = {"uid": "u", "name": "n", "namespace": "s", "resourceVersion": "7"}
    raw = {"apiVersion": "v1", "kind": "Pod", "metadata": {**others, **own}, "spec": own}
    text = json.dumps(raw, indent=indent, ensure_ascii=ascii_only, sort_keys=in_order)
    event = f'{{"type": "ADDED", "object": {text}}}\n'.encode(errors="replace")
    assert event_identity(event, "why") == ("ADDED", Unreadable("s", "n", "u", 7, "why"))


HEAVY: dict[str, Raw] = {
    "labels": {"labels": {f"label-{number:06}": "v" for number in range(66_000)}},
    "forged": {"annotations": {"resourceVersion": "1", "uid": "another's", "name": "x", "z": TEXT}},
    "owners": {"ownerReferences": [{"uid": str(number), "name": "o"} for number in range(12_000)]},
    "finalizers": {"finalizers": [f"x.io/f{number}" for number in range(40_000)]},
    "managed fields": {"managedFields": [{"fieldsV1": {f"f:{number}": {"uid": {}} for number in range(10_000)}}]},
}


@pytest.mark.parametrize("heavy", HEAVY.values(), ids=HEAVY)
def test_the_object_is_found_behind_much_else(heavy: Raw) -> None:
    own = {"name": "n", "namespace": "s", "resourceVersion": "7", "uid": "u"}
    event = {"type": "MODIFIED", "object": {"metadata": {**heavy, **own}}}
    assert event_identity(json.dumps(event).encode(), "why") == ("MODIFIED", Unreadable("s", "n", "u", 7, "why"))


def test_what_is_looked_at_for_it_is_bounded() -> None:
    own = {"name": "n", "namespace": "s", "resourceVersion": "7", "uid": "u"}
    event = {"type": "MODIFIED", "object": {"metadata": {"managedFields": [[{}]] * 100_000, **own}}}
    assert event_identity(json.dumps(event).encode(), "why") == ("MODIFIED", None)
