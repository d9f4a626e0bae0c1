"""Requests: what refusals mean, and which faults the caller never sees."""

import asyncio
import base64

import pytest
from aiohttp import web
from yarl import URL

from disttrain_operator.kube import errors
from disttrain_operator.kube.auth import Access, Credentials
from disttrain_operator.kube.client import MAX_ERROR_BYTES, Client
from disttrain_operator.kube.lists import list_pages
from tests.forward_proxy import ForwardProxy
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi, Raw, refusal
from tests.waiting import GENEROUS

PODS = "/api/v1/namespaces/team/pods"
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (400, "BadRequest", errors.Invalid),
        (401, "Unauthorized", errors.Unauthorized),
        (403, "Forbidden", errors.Forbidden),
        (404, "NotFound", errors.NotFound),
        (409, "AlreadyExists", errors.Conflict),
        (410, "Expired", errors.Expired),
        (422, "Invalid", errors.Invalid),
        (418, "Teapot", errors.ApiError),
        (500, "InternalError", errors.ServerTrouble),
        (503, "ServiceUnavailable", errors.Unavailable),
    ],
)
async def test_a_refusal_becomes_an_error_of_its_kind(api, client, code, reason, expected):
    api.refusals.append(lambda *_: refusal(code, reason, "the words"))
    with pytest.raises(expected, match="the words") as caught:
        await client.get(PODS)
    if isinstance(caught.value, errors.ApiError):
        assert (caught.value.code, caught.value.reason) == (code, reason)


async def test_an_answer_that_is_no_status_keeps_its_words(api: FakeApi, client: Client) -> None:
    api.refusals.append(lambda *_: web.Response(text="404 page not found", status=404))
    with pytest.raises(errors.NotFound, match="page not found") as caught:
        await client.get(PODS)
    assert caught.value.reason == ""


async def test_of_a_refusal_without_end_the_code_is_kept(api: FakeApi, client: Client) -> None:
    """Red without the bound on what is read of a refusal."""
    api.refusals.append(lambda *_: web.Response(status=422, body=b"x" * (MAX_ERROR_BYTES + 1)))
    with pytest.raises(errors.Invalid) as caught:
        await client.get(PODS)
    assert (caught.value.code, caught.value.message) == (422, "HTTP 422")


async def test_quota_and_terminating_namespaces_differ_from_other_refusals(api: FakeApi, client: Client) -> None:
    message = 'pods "a" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
    api.refusals.append(lambda *_: refusal(403, "Forbidden", message))
    with pytest.raises(errors.Forbidden) as caught:
        await client.create(PODS, POD)
    assert caught.value.is_quota
    assert not caught.value.is_namespace_terminating


@pytest.mark.parametrize("code", [500, 502, 503, 504])
async def test_passing_server_trouble_is_not_seen_by_the_caller(api: FakeApi, client: Client, code: int) -> None:
    troubles = [refusal(code, "InternalError"), refusal(code, "InternalError")]
    api.refusals.append(lambda *_: troubles.pop() if troubles else None)
    made = await client.create(PODS, POD)
    assert made["metadata"]["name"] == "a"
    assert len(api.asked("POST")) == 3


@pytest.mark.parametrize("answer", ['{"kind": "Po', "[]"])
async def test_an_answer_that_is_no_object_is_asked_for_again(api: FakeApi, client: Client, answer: str) -> None:
    cut = [answer, answer]
    api.refusals.append(lambda *_: web.Response(text=cut.pop()) if cut else None)
    assert (await client.create(PODS, POD))["metadata"]["name"] == "a"
    assert len(api.asked("POST")) == 3


async def test_a_lost_answer_to_a_post_ends_in_already_exists(api: FakeApi, client: Client) -> None:
    lost: list[str] = []

    def drop_after_storing(method: str, path: str, body: Raw | None) -> web.Response | None:
        if method == "POST" and not lost:
            lost.append(path)
            api.objects[f"{PODS}/a"] = {"metadata": {"name": "a", "uid": "u", "resourceVersion": "101"}}
            return refusal(504, "Timeout")
        return None

    api.refusals.append(drop_after_storing)
    with pytest.raises(errors.Conflict) as caught:
        await client.create(PODS, POD)
    assert caught.value.already_exists


async def test_nobody_listening_is_unavailable() -> None:
    client = Client(Access("http://127.0.0.1:1"), retry_delays=(0.0, 0.0))
    with pytest.raises(errors.Unavailable, match="Cannot connect to host"):
        await client.get(PODS)
    await client.close()


async def test_429_holds_all_requests_back_until_retry_after(api: FakeApi) -> None:
    now, over, waits = [100.0], asyncio.Event(), list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await over.wait()

    client = Client(Access(api.url), retry_delays=(), clock=lambda: now[0], sleep=sleep)
    answers = [refusal(429, "TooManyRequests", headers={"Retry-After": "7"})]
    api.refusals.append(lambda *_: answers.pop() if answers else None)
    with pytest.raises(errors.Throttled, match=r"^429 "):
        await client.get(PODS)
    asked = len(api.asked("GET"))
    held = [asyncio.create_task(client.get(path)) for path in (PODS, "/api/v1/nodes")]
    await eventually(lambda: len(waits) == 2)
    assert waits == [7.0, 7.0]
    assert len(api.asked("GET")) == asked
    now[0] += 7
    over.set()
    await asyncio.gather(*held, client.get(PODS))
    assert len(waits) == 2, "the time is over"
    await client.close()


async def test_429_for_ever_reaches_the_caller(api: FakeApi, client: Client) -> None:
    api.refusals.append(lambda *_: refusal(429, "TooManyRequests", headers={"Retry-After": "0.01"}))
    with pytest.raises(errors.Throttled, match=r"^429 "):
        await client.get(PODS)
    assert len(api.asked("GET")) > 1


async def test_no_more_requests_are_in_flight_than_allowed(api: FakeApi) -> None:
    running, most = 0, 0
    gate = asyncio.Event()

    class Slow(FakeApi):
        async def _post(self, path: str, body: Raw) -> web.Response:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await gate.wait()
            running -= 1
            return await super()._post(path, body)

    async with Slow() as slow:
        client = Client(Access(slow.url), max_in_flight=3)
        creations = [
            asyncio.create_task(client.create(PODS, {"metadata": {"name": f"p{index}"}})) for index in range(10)
        ]
        await eventually(lambda: running == 3)
        gate.set()
        await asyncio.gather(*creations)
        await client.close()
    assert most == 3


async def test_a_list_comes_in_pages(api: FakeApi, client: Client) -> None:
    for index in range(5):
        await api.put(f"{PODS}/p{index}")
    pages = [page async for page in list_pages(client, "/api/v1/pods", {}, chunk=2)]
    assert [len(page.objects) for page in pages] == [2, 2, 1]


async def test_a_delete_names_the_uid(api: FakeApi, client: Client) -> None:
    pod = await api.put(f"{PODS}/a")
    with pytest.raises(errors.Conflict, match="the UID in the precondition does not match"):
        await client.delete(f"{PODS}/a", uid="of another")
    await client.delete(f"{PODS}/a", uid=pod["metadata"]["uid"], grace_seconds=5)
    assert api.objects == {}


async def test_the_token_is_asked_for_with_every_request(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(["first", "second"])
    credentials = Credentials()
    monkeypatch.setattr(credentials, "token", lambda: next(tokens))
    client = Client(Access(api.url, credentials))
    await client.get(PODS)
    await client.get(PODS)
    await client.close()
    assert list(tokens) == []


async def test_a_time_out_closes_idle_connections_and_no_others(monkeypatch):
    """Behind a half-open path all kept connections are dead: they must not cost a time-out each."""
    answering = True
    opened = 0
    passed = 0.0
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda real=loop.time: real() + passed)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        mine = answering
        while (line := await reader.readline()) and mine == answering:
            watch = b"watch" in line
            while (await reader.readline()).strip():
                pass
            body = b"" if watch else b"{}"
            length = b"100" if watch else b"2"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: " + length + b"\r\n\r\n" + body)
            if watch:
                while not over.is_set():
                    writer.write(b".")
                    await asyncio.sleep(0.01)
                return
        unanswered.set()
        await over.wait()

    unanswered, over = asyncio.Event(), asyncio.Event()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = Client(Access(url), timeout=GENEROUS, retry_delays=())
    try:
        async with client.stream(PODS, {"watch": "true"}, silence=10 * GENEROUS) as chunks:
            await anext(chunks)
            await asyncio.gather(*(client.get(PODS) for _ in range(5)))
            kept, answering = opened, False
            asking = asyncio.create_task(client.get(PODS))
            await unanswered.wait()
            passed += GENEROUS + 1
            with pytest.raises(errors.Unavailable, match=r"TimeoutError$"):
                await asking
            assert opened == kept, "a kept connection was tried"
            await client.get(PODS)
            assert opened == kept + 1, "the others were not"
            assert await anext(chunks)
    finally:
        over.set()
        await client.close()
        server.close()


async def test_a_namespace_with_many_requests_lets_others_through(api: FakeApi) -> None:
    """Namespaces whose requests wait for a slot take turns."""
    client = Client(Access(api.url), max_in_flight=2)
    pods = "/api/v1/namespaces/{}/pods"

    async def create(namespace: str, number: int) -> None:
        await client.create(pods.format(namespace), {"metadata": {"name": f"pod-{number}"}})

    crowd = [asyncio.create_task(create("crowded", number)) for number in range(200)]
    await asyncio.sleep(0)
    await asyncio.gather(*(create("quiet", number) for number in range(5)))
    done = sum(task.done() for task in crowd)
    await asyncio.gather(*crowd)
    await client.close()
    assert done < 20
    order = [path for _, path in api.requests]
    last_of_quiet = max(index for index, path in enumerate(order) if "quiet" in path)
    assert last_of_quiet < 20


async def test_a_request_that_is_given_up_while_it_waits_takes_no_slot_with_it(api: FakeApi) -> None:
    client = Client(Access(api.url), max_in_flight=1)
    waiting = [asyncio.create_task(client.get(f"/api/v1/namespaces/n{number}/pods")) for number in range(10)]
    await asyncio.sleep(0)
    for task in waiting[::2]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (await asyncio.wait_for(client.get("/api/v1/namespaces/last/pods"), GENEROUS))["items"] == []
    await client.close()


async def test_what_is_made_or_patched_is_validated_strictly(api: FakeApi, client: Client) -> None:
    api.refusals.append(lambda *_: web.json_response({}))
    await client.create(PODS, POD)
    await client.patch(f"{PODS}/a", {})
    await client.replace(f"{PODS}/a/status", POD)
    assert api.validated == [("POST", "Strict"), ("PATCH", "Strict"), ("PUT", None)]


async def test_lost_fields_are_logged_once(api: FakeApi, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Warning": '299 - "unknown field \\"status.newer\\""'}
    api.refusals.append(lambda *_: web.json_response({}, headers=headers))
    for _ in range(2):
        await client.replace(f"{PODS}/a/status", POD)
    (line,) = caplog.messages
    assert "status.newer" in line
    assert "is its CustomResourceDefinition of this release?" in line


async def test_a_plain_server_is_asked_and_watched_through_a_proxy(api: FakeApi) -> None:
    with ForwardProxy(("127.0.0.1", URL(api.url).port or 0)) as proxy:
        client = Client(
            Access("http://kube.example.test", proxy=proxy.url.replace("//", "//me:word@")), retry_delays=()
        )
        try:
            version = (await client.get(PODS))["metadata"]["resourceVersion"]
            query = {"watch": "true", "resourceVersion": version}
            async with client.stream(PODS, query, silence=GENEROUS) as chunks:
                await api.put(f"{PODS}/a")
                assert b"ADDED" in await anext(chunks)
        finally:
            await client.close()
    basic = f"Basic {base64.b64encode(b'me:word').decode()}"
    assert proxy.asked == [(f"GET http://kube.example.test{PODS}", basic)]  # one connection, which is kept
