"""Viewers with tokens of their own: whose rights decide, what is kept for whom, and how much each may ask for."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from disttrain_dashboard.app import application_of_viewers
from disttrain_dashboard.source import SourceError
from disttrain_dashboard.viewers import MAX_NAMESPACES, Limits, Viewers
from tests.unit.dashboard.jobs import Jobs, a_dashboard_job

JOBS, JOB, LOG = "/api/jobs", "/api/job?key=default/digits", "/api/log?key=default/digits"


class Own(Jobs):
    """What a token may see; `refuses` is the status by which it is refused everything."""

    refuses = 0

    def _count(self, *what: Any) -> None:
        super()._count(*what)
        if self.refuses:
            raise SourceError(f"refused with {self.refuses}", self.refuses)


class World:
    """A source for each token; unknown ones are refused with 401."""

    def __init__(self) -> None:
        self.of = {"ann": Own(a_dashboard_job(), seconds=3600), "bob": Own(a_dashboard_job("other"), seconds=3600)}
        self.opened: list[tuple[str, tuple[str, ...]]] = []
        self.now = 0.0

    def open(self, token: str, namespaces: tuple[str, ...]) -> Jobs:
        self.opened.append((token, namespaces))
        if token not in self.of:
            self.of[token] = Own(seconds=3600)
            self.of[token].refuses = 401
        return self.of[token]

    def client(self, namespaces: tuple[str, ...] = (), **limits: Any) -> TestClient:
        viewers = Viewers(self.open, namespaces, Limits(**limits), lambda: self.now)
        return TestClient(TestServer(application_of_viewers(viewers, 8)))


class Slow:
    """An answer of a source that comes when the test says so."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.error: SourceError | None = None

    def __call__(self, *_: object) -> list[str]:
        self.begun.set()
        self.go_on.wait(60)
        if self.error is not None:
            raise self.error
        return []

    async def under_way(self) -> bool:
        """Whether somebody waits for it."""
        return await asyncio.to_thread(self.begun.wait, 60)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def slow() -> Iterator[Slow]:
    found = Slow()
    yield found
    found.go_on.set()


@pytest.fixture
async def client(world: World) -> AsyncIterator[TestClient]:
    async with world.client() as client:
        yield client


def by(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def names(client: TestClient, token: str, query: str = "") -> list[str]:
    answer = await client.get(f"{JOBS}{query}", headers=by(token))
    assert answer.status == 200, await answer.text()
    return [job["name"] for job in (await answer.json())["jobs"]]


@pytest.mark.parametrize("path", [JOBS, JOB, LOG])
@pytest.mark.parametrize(
    "headers",
    [{}, by(""), by("a b"), by("ä"), {"Authorization": "ann"}, {"Authorization": "Basic ann"}, {"Cookie": "token=ann"}],
    ids=str,
)
async def test_without_a_token_nothing_is_asked(client, world, path, headers) -> None:
    answer = await client.get(path, headers=headers)
    assert (answer.status, (await answer.json())["ask"]) == (401, "token")
    answer = await client.get(f"{path}{'&' if '?' in path else '?'}token=ann")
    assert answer.status == 401
    assert world.opened == []


@pytest.mark.parametrize("path", [JOBS, JOB, LOG])
async def test_the_source_is_opened_with_the_token_of_the_request(client, world, path) -> None:
    assert (await client.get(path, headers=by("ann"))).status == 200
    assert world.opened == [("ann", ())]


async def test_what_one_was_shown_is_not_given_to_another(client, world) -> None:
    """Red where what is kept is found by the page alone."""
    assert await names(client, "ann") == ["digits"]
    assert await names(client, "bob") == ["other"]
    for path in (JOB, LOG):
        assert (await client.get(path, headers=by("ann"))).status == 200
        assert (await client.get(path, headers=by("bob"))).status == 404
    first = await client.get(JOBS, headers=by("ann"))
    again = await client.get(JOBS, headers={**by("bob"), "If-None-Match": first.headers["ETag"]})
    assert again.status == 200
    assert await names(client, "ann") == ["digits"]
    assert [what for what in world.of["ann"].asked if what == ("jobs",)] == [("jobs",)], "kept for its owner"


async def test_a_token_that_is_refused_is_forgotten_with_what_it_was_shown(client, world) -> None:
    assert await names(client, "ann") == ["digits"]
    world.of["ann"].refuses = 401
    for path in (JOB, JOBS, LOG):
        answer = await client.get(path, headers=by("ann"))
        assert (answer.status, (await answer.json())["ask"]) == (401, "token")
    assert "refused with" not in (await answer.json())["error"]
    world.of["ann"].refuses = 0
    assert await names(client, "ann") == ["digits"]


async def test_an_answer_under_way_does_not_bring_a_refused_token_back(client, world, slow, monkeypatch) -> None:
    """Red where the viewer that was forgotten is remembered again, with what is kept for it."""
    assert await names(client, "ann") == ["digits"]
    monkeypatch.setattr(world.of["ann"], "log", slow)
    waiting = asyncio.create_task(client.get(LOG, headers=by("ann")))
    assert await slow.under_way()
    world.of["ann"].refuses = 401
    assert (await client.get(JOB, headers=by("ann"))).status == 401
    slow.go_on.set()
    assert (await waiting).status == 200
    assert (await client.get(JOBS, headers=by("ann"))).status == 401


@pytest.mark.parametrize(("path", "ask"), [(JOBS, "namespaces"), (JOB, ""), (LOG, "")])
async def test_what_may_not_be_seen_is_said_in_the_words_of_the_source(client, world, path, ask) -> None:
    world.of["ann"].refuses = 403
    answer = await client.get(path, headers=by("ann"))
    assert (answer.status, await answer.json()) == (403, {"error": "refused with 403", "ask": ask})


async def test_a_source_that_is_away_is_no_fault_of_the_token(client, world) -> None:
    world.of["ann"].problem = "the cluster does not answer"
    answer = await client.get(JOBS, headers=by("ann"))
    assert (answer.status, await answer.json()) == (503, {"error": "the cluster does not answer", "ask": ""})


async def test_the_namespaces_of_a_list(world) -> None:
    async with world.client(("default", "team")) as client:
        await names(client, "ann")
        await names(client, "ann", "?namespaces=b,a,,b")
        assert (await client.get(JOB, headers=by("ann"))).status == 200
        assert world.opened == [("ann", ("default", "team")), ("ann", ("a", "b")), ("ann", ())]
        for wrong in ("A", "a/b", "..", "-a", "a" * 64, ",".join(f"n{number}" for number in range(MAX_NAMESPACES + 1))):
            answer = await client.get(f"{JOBS}?namespaces={wrong}", headers=by("ann"))
            assert (answer.status, (await answer.json())["ask"]) == (400, "namespaces")
    assert len(world.opened) == 3


async def test_lists_of_other_namespaces_are_other_answers() -> None:
    found = {(): Jobs(a_dashboard_job("all"), seconds=3600), ("a",): Jobs(a_dashboard_job("of-a"), seconds=3600)}
    viewers = Viewers(lambda _, namespaces: found[namespaces])
    async with TestClient(TestServer(application_of_viewers(viewers, 8))) as client:
        assert await names(client, "ann") == ["all"]
        assert await names(client, "ann", "?namespaces=a") == ["of-a"]


async def test_a_viewer_has_so_many_requests_and_no_more(world) -> None:
    async with world.client(per_second=1.0, burst=3.0) as client:
        # The first is one of the requests of all whose token is not known.
        found = [(await client.get(JOBS, headers=by("ann"))).status for _ in range(5)]
        assert found == [200, 200, 200, 200, 429]
        assert await names(client, "bob") == ["other"]
        world.now = 2.0
        found = [(await client.get(JOBS, headers=by("ann"))).status for _ in range(3)]
        assert found == [200, 200, 429]


async def test_requests_of_a_viewer_wait_and_not_too_many(world, slow, monkeypatch) -> None:
    async with world.client(at_once=1, waiting=2) as client:
        assert await names(client, "ann") == ["digits"]
        monkeypatch.setattr(world.of["ann"], "log", slow)
        under_way = asyncio.create_task(client.get(LOG, headers=by("ann")))
        assert await slow.under_way()
        others = [asyncio.create_task(client.get(JOB, headers=by("ann"))) for _ in range(2)]
        refused = next(iter(await asyncio.wait(others, return_when="FIRST_COMPLETED"))).pop().result()
        assert refused.status == 429
        assert await names(client, "bob") == ["other"], "asked after, and answered"
        assert ("job", "default/digits") not in world.of["ann"].asked
        slow.go_on.set()
        assert [(await one).status for one in (under_way, *others)].count(200) == 2


async def test_guessed_tokens_keep_no_viewer_waiting(world, slow, monkeypatch) -> None:
    """Red where they have a place of their own each, or share those of viewers."""
    async with world.client(at_once=1, waiting=1, burst=2.0, per_second=0.0) as client:
        assert await names(client, "ann") == ["digits"]
        world.of["guess"], slow.error = Own(), SourceError("wrong", 401)
        monkeypatch.setattr(world.of["guess"], "jobs", slow)
        guess = asyncio.create_task(client.get(JOBS, headers=by("guess")))
        assert await slow.under_way()
        assert (await client.get(JOBS, headers=by("guess-2"))).status == 429
        assert await names(client, "ann") == ["digits"]
        slow.go_on.set()
        assert (await guess).status == 401
        assert (await client.get(JOBS, headers=by("guess-3"))).status == 429
        assert (await client.get(JOB, headers=by("ann"))).status == 200


async def test_the_tokens_that_are_remembered_are_few(world) -> None:
    world.of |= {f"t{number}": Own(seconds=3600) for number in range(3)}
    async with world.client(readers=2) as client:
        for number in (0, 1, 0, 2, 0, 1):
            await names(client, f"t{number}")
    assert [token for token, _ in world.opened] == ["t0", "t1", "t2", "t1"]


async def test_health_needs_no_token_and_asks_nobody(client, world) -> None:
    answer = await client.get("/healthz", headers={"Host": "10.1.2.3:8080"})
    assert (answer.status, await answer.text()) == (200, "ok\n")
    assert world.opened == []


@pytest.mark.parametrize("path", ["/", "/main.js", "/none", JOBS, "/api/job"])
async def test_a_connection_is_for_one_request(client, path) -> None:
    answer = await client.get(path, headers=by("ann"))
    assert answer.headers["Connection"] == "close"
    assert "Content-Security-Policy" in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", [JOBS, JOB, LOG, "/healthz"])
async def test_nothing_can_be_written(client, world, method, path) -> None:
    assert (await client.request(method, path, headers=by("ann"))).status == 405
    assert world.opened == []
