"""The memory of a list is bounded, whatever its objects are made of, and the loop goes on while it is read."""

import asyncio
import threading
import tracemalloc
from typing import Any

import orjson
import pytest

from disttrain_operator.kube import lists
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import TooLarge
from disttrain_operator.kube.lists import MAX_OBJECT_BYTES, MAX_PAGE_BYTES, Page, list_pages
from disttrain_operator.kube.one_at_a_time import PAGES_AT_A_TIME, in_thread
from disttrain_operator.kube.sizes import MAX_PARSED_BYTES, parsed_size, size_of
from tests.unit.operator.conftest import eventually

Raw = dict[str, Any]
SHAPES: dict[str, bytes] = {
    "objects": b"[" + b",".join([b"{}"] * 100_000) + b"]",
    "lists": b"[" + b",".join([b"[]"] * 100_000) + b"]",
    "lists of lists": b"[" + b",".join([b"[[]]"] * 60_000) + b"]",
    "objects of one key": b"[" + b",".join([b'{"a":1}'] * 50_000) + b"]",
    "objects of objects": b"[" + b",".join([b'{"a":{}}'] * 50_000) + b"]",
    "terms": b"[" + b",".join([b'{"matchExpressions":[{"key":"a","operator":"Exists"}]}'] * 10_000) + b"]",
    "numbers": b"[" + b",".join(b"%d" % (2**40 + number) for number in range(50_000)) + b"]",
    "short texts": b"[" + b",".join([b'"ab"'] * 100_000) + b"]",
    "keys": orjson.dumps({f"k{number}": number for number in range(50_000)}),
    "long keys": orjson.dumps({f"{number:070}": None for number in range(10_000)}),
    "a long text": orjson.dumps("x" * 1_000_000),
    "a wide text": orjson.dumps("x" * 1_000_000 + "\U0001f600"),
    "short wide texts": orjson.dumps(["é"] * 100_000),
}


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
def test_no_text_takes_more_memory_than_is_reckoned_before_it_is_parsed(text: bytes) -> None:
    """Red where an object is reckoned at half of its size."""
    tracemalloc.start()
    try:
        parsed = orjson.loads(text)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= parsed_size(text)
    assert taken == pytest.approx(size_of(parsed), rel=0.3), "and the size of a value is what it takes"


class Server:
    """Answers lists of these objects."""

    def __init__(self, *objects: Raw) -> None:
        self.objects, self.asked = [orjson.dumps(raw) for raw in objects], list[int]()

    async def read(self, path: str, query: dict[str, str], most: int, *, accept: str = "") -> bytes:
        first, limit = int(query.get("continue", 0)), int(query["limit"])
        self.asked.append(limit)
        page, metadata = self.objects[first : first + limit], {"resourceVersion": "100"}
        if first + limit < len(self.objects):
            metadata["continue"] = str(first + limit)
        body = b'{"items":[' + b",".join(page) + b'],"metadata":' + orjson.dumps(metadata) + b"}"
        if len(body) > most:
            raise TooLarge("it is too large")
        return body


class Slow(Server):
    """Answers when it may."""

    def __init__(self, *objects: Raw) -> None:
        super().__init__(*objects)
        self.waiting, self.most = 0, 0
        self.go_on = asyncio.Event()

    async def read(self, path: str, query: dict[str, str], most: int, *, accept: str = "") -> bytes:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self.go_on.wait()
        self.waiting -= 1
        return await super().read(path, query, most, accept=accept)


def an_object(number: int, spec: Any = None) -> Raw:
    return {"metadata": {"uid": f"u{number}", "name": f"n{number}", "resourceVersion": "7"}, "spec": spec}


def names(raw: Raw) -> Raw:
    return {"metadata": raw["metadata"]}


async def pages(server: Server, **how: Any) -> list[Page]:
    client: Client = server  # type: ignore[assignment]
    return [page async for page in list_pages(client, "/api/v1/pods", {}, **{"trim": names, **how})]


async def test_few_pages_are_held_at_a_time_however_many_lists_there_are() -> None:
    """Red where a list asks for a page whoever else holds one."""
    server = Slow(an_object(1))
    lists_ = asyncio.gather(*(pages(server) for _ in range(3 * PAGES_AT_A_TIME)))
    await eventually(lambda: server.waiting == PAGES_AT_A_TIME)
    for _ in range(10):
        await asyncio.sleep(0)
    server.go_on.set()
    await lists_
    assert server.most == PAGES_AT_A_TIME


async def test_a_list_of_objects_of_many_parts_takes_the_memory_of_few_of_them() -> None:
    """Six of them take 230 MB as objects, and nothing less than their text says so. Red where a page is parsed whatever
    its parts take."""
    server = Server(*(an_object(number, [{}] * 440_000) for number in range(6)))
    tracemalloc.start()
    try:
        found = await pages(server)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [raw["metadata"]["name"] for page in found for raw in page.objects] == [f"n{n}" for n in range(6)]
    assert most < MAX_PARSED_BYTES + 4 * MAX_PAGE_BYTES
    assert len(server.asked) < 6 + 6, "what was asked for in vain is not asked for at each page"


async def test_an_object_of_too_many_parts_is_named_and_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "MAX_PARSED_BYTES", 5 * 2**20)
    server = Server(an_object(0), an_object(1, [{}] * 100_000), an_object(2))
    found = await pages(server, chunk=2)
    assert [raw["metadata"]["name"] for page in found for raw in page.objects] == ["n0", "n2"]
    (left_out,) = (one for page in found for one in page.unreadable)
    assert (left_out.name, left_out.uid, left_out.version) == ("n1", "u1", 7)
    assert left_out.why == "it has so many parts that it takes more than 64 MiB to read"


def test_no_object_as_large_as_an_api_server_stores_has_too_many_parts() -> None:
    stored = 1_500_000
    assert parsed_size(SHAPES["objects"]) / len(SHAPES["objects"]) * stored < MAX_PARSED_BYTES
    assert parsed_size(SHAPES["a long text"]) * MAX_OBJECT_BYTES / 1_000_000 < MAX_PARSED_BYTES


async def test_objects_are_trimmed_beside_the_loop_and_what_was_parsed_is_let_go_one_by_one() -> None:
    threads, sizes = set[int](), list[int]()

    def trim(raw: Raw) -> Raw:
        threads.add(threading.get_ident())
        sizes.append(tracemalloc.get_traced_memory()[0])
        return names(raw)

    server = Server(*(an_object(number, list(range(2**40, 2**40 + 20_000))) for number in range(10)))
    tracemalloc.start()
    try:
        await pages(server, trim=trim)
    finally:
        tracemalloc.stop()
    assert threading.get_ident() not in threads
    assert sizes[-1] < sizes[0] / 2, sizes


async def test_what_is_read_beside_the_loop_is_read_one_at_a_time() -> None:
    running, most, go_on = [0], [0], threading.Event()

    def work() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        go_on.wait(0.01)
        running[0] -= 1

    await asyncio.gather(*(in_thread(work) for _ in range(5)))
    assert most == [1]
