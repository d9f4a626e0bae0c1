"""The HTTP application: who may read it, what it answers, and how much."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from disttrain_dashboard.app import MAX_LINE, MAX_STACKS, MAX_TAIL, application
from tests.unit.dashboard.jobs import EVIL, Jobs, a_dashboard_job

TOKEN = "the-token"
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
DATA = ("/api/jobs", "/api/job?key=default/digits", "/api/log?key=default/digits", "/api/stacks?key=default/digits")


@pytest.fixture
def jobs() -> Jobs:
    return Jobs(a_dashboard_job())


@pytest.fixture
async def client(jobs: Jobs) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(application(jobs, TOKEN))) as client:
        yield client


class TestWhoMayRead:
    @pytest.mark.parametrize("path", [*DATA, "/api/none"])
    @pytest.mark.parametrize(
        "headers", [{}, {"Authorization": "Bearer x"}, {"Authorization": TOKEN}, {"Cookie": f"token={TOKEN}"}], ids=str
    )
    async def test_data_need_the_token(self, client, jobs, path, headers) -> None:
        answer = await client.get(path, headers=headers)
        assert answer.status == 401
        assert "token" in (await answer.json())["error"]
        assert jobs.asked == []

    async def test_a_token_in_the_address_is_none(self, client, jobs) -> None:
        assert (await client.get(f"/api/jobs?token={TOKEN}")).status == 401
        assert jobs.asked == []

    @pytest.mark.parametrize("path", ["/", "/main.js", "/api/jobs"])
    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1", "", "10.0.0.1"]
    )
    async def test_a_name_that_leads_here_and_is_not_ours_is_refused(self, client, jobs, path, host) -> None:
        answer = await client.get(path, headers=RIGHT | {"Host": host})
        assert answer.status in (400, 403)
        assert jobs.asked == []

    @pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "LOCALHOST:99", "[::1]:8470"])
    async def test_this_machine_is_called_by_any_port(self, client, host) -> None:
        assert (await client.get("/api/jobs", headers=RIGHT | {"Host": host})).status == 200

    @pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    @pytest.mark.parametrize("path", ["/", *DATA])
    async def test_nothing_can_be_written(self, client, jobs, method, path) -> None:
        assert (await client.request(method, path, headers=RIGHT)).status == 405
        assert jobs.asked == []

    @pytest.mark.parametrize("path", ["/", "/main.js", "/none", "/api/jobs", "/api/job?key=none"])
    @pytest.mark.parametrize("headers", [{}, RIGHT, {"Host": "evil.example"}], ids=["no token", "token", "host"])
    async def test_every_answer_forbids_foreign_scripts(self, client, path, headers) -> None:
        found = (await client.get(path, headers=headers)).headers
        policy = dict(part.strip().split(" ", 1) for part in found["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert found["X-Content-Type-Options"] == "nosniff"
        assert "Set-Cookie" not in found
        assert "Access-Control-Allow-Origin" not in found


class TestAnswers:
    async def test_the_list_and_a_job(self, client) -> None:
        listed = await (await client.get("/api/jobs", headers=RIGHT)).json()
        assert [job["name"] for job in listed["jobs"]] == ["digits"]
        assert listed["title"] == "Jobs of a test"
        found = await (await client.get("/api/job?key=default/digits", headers=RIGHT)).json()
        assert (found["why"], found["todo"], found["ranks"]["states"]) == ("it runs", ["Wait"], "rw")

    @pytest.mark.parametrize("path", DATA[:2])
    async def test_what_has_not_changed_is_not_sent_again(self, client, jobs, path) -> None:
        first = await client.get(path, headers=RIGHT)
        again = await client.get(path, headers=RIGHT | {"If-None-Match": first.headers["ETag"]})
        assert (again.status, await again.read()) == (304, b"")
        jobs.known["default/digits"] = a_dashboard_job(phase="Failed")
        changed = await client.get(path, headers=RIGHT | {"If-None-Match": first.headers["ETag"]})
        assert changed.status == 200
        assert changed.headers["ETag"] != first.headers["ETag"]

    async def test_readers_share_an_answer_while_it_holds(self) -> None:
        jobs = Jobs(a_dashboard_job(), seconds=3600)
        async with TestClient(TestServer(application(jobs, TOKEN))) as client:
            answers = await asyncio.gather(*(client.get("/api/jobs", headers=RIGHT) for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
        assert jobs.asked == [("jobs",)]

    @pytest.mark.parametrize("path", ["/api/job?key=default/none", "/api/log?key=../../etc/passwd"])
    async def test_an_unknown_job_is_a_sentence(self, client, path) -> None:
        answer = await client.get(path, headers=RIGHT)
        assert (answer.status, (await answer.json())["error"]) == (
            404,
            "no such job: it was deleted, or its folder was",
        )

    async def test_a_source_that_cannot_answer_says_why_and_is_asked_again(self, client, jobs) -> None:
        jobs.problem = f"no cluster {EVIL}"
        answer = await client.get("/api/jobs", headers=RIGHT)
        assert answer.status == 503
        assert (await answer.json())["error"].startswith("no cluster <img")
        jobs.problem = ""
        assert (await client.get("/api/jobs", headers=RIGHT)).status == 200

    @pytest.mark.parametrize(
        "query",
        ["", "?key=", f"?key={'a' * 600}", "?key=a&rank=-1", "?key=a&rank=x", "?key=a&tail=1e3", "?key=a&rank=٣"],
    )
    async def test_a_wrong_question_is_a_sentence(self, client, query) -> None:
        answer = await client.get(f"/api/log{query}", headers=RIGHT)
        assert answer.status == 400
        assert (await answer.json())["error"].startswith("`")

    async def test_a_log_is_bounded_in_lines_and_their_length(self, client, jobs) -> None:
        jobs.lines = ["x" * 10**6 + EVIL] * 5000
        found = await (await client.get("/api/log?key=default/digits&rank=1&tail=999999", headers=RIGHT)).json()
        assert len(found["lines"]) == MAX_TAIL
        assert max(map(len, found["lines"])) <= MAX_LINE
        assert jobs.asked[-1] == ("log", "default/digits", 1, MAX_TAIL)

    async def test_stacks_are_lines_of_a_bounded_text(self, client, jobs) -> None:
        found = await (await client.get("/api/stacks?key=default/digits&rank=1", headers=RIGHT)).json()
        assert found == {"lines": ["Current thread 0x1", '  File "step.py", line 9 in step']}
        assert jobs.asked[-1] == ("stacks", "default/digits", 1)
        jobs.calls = ("x" * (2 * MAX_LINE) + "\n") * 1000
        found = await (await client.get("/api/stacks?key=default/digits&rank=1", headers=RIGHT)).json()
        assert sum(map(len, found["lines"])) <= MAX_STACKS
        assert max(map(len, found["lines"])) <= MAX_LINE

    async def test_a_log_is_its_last_lines(self, client) -> None:
        found = await (await client.get("/api/log?key=default/digits&tail=2", headers=RIGHT)).json()
        assert found == {"lines": ["line 998", "line 999"]}

    async def test_a_mistake_of_ours_is_a_sentence_and_the_next_answer_comes(
        self, client, jobs, monkeypatch, caplog
    ) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(jobs, "job", lambda _: {}["a"])
            answer = await client.get("/api/job?key=a%0Ab", headers=RIGHT)
        assert answer.status == 500
        assert "\n" not in caplog.records[-1].getMessage()
        assert "KeyError" in (await answer.json())["error"]
        assert "Content-Security-Policy" in answer.headers
        assert "Traceback" in caplog.text
        assert (await client.get("/api/jobs", headers=RIGHT)).status == 200

    @pytest.mark.parametrize(("bound", "most"), [("_MAX_KEPT", 2), ("_MAX_KEPT_BYTES", 25_000)])
    async def test_what_is_kept_is_bounded(self, monkeypatch, bound, most) -> None:
        """The last two of three answers of 10,000 bytes are kept."""
        monkeypatch.setattr(f"disttrain_dashboard.app.{bound}", most)
        jobs = Jobs(a_dashboard_job(), seconds=3600)
        jobs.lines = ["x" * 1000] * 10
        async with TestClient(TestServer(application(jobs, TOKEN))) as client:
            for rank in (0, 1, 0, 2, 0, 1):
                assert (await client.get(f"{DATA[2]}&rank={rank}", headers=RIGHT)).status == 200
        assert [what[2] for what in jobs.asked] == [0, 1, 2, 1]

    async def test_a_slow_answer_holds_up_no_other(self, client, jobs, monkeypatch) -> None:
        begun, go_on = threading.Event(), threading.Event()
        listed = jobs.jobs

        def slow() -> Any:
            begun.set()
            go_on.wait(60)
            return listed()

        monkeypatch.setattr(jobs, "jobs", slow)
        waiting = asyncio.create_task(client.get("/api/jobs", headers=RIGHT))
        assert await asyncio.to_thread(begun.wait, 60)
        assert (await client.get(DATA[1], headers=RIGHT)).status == 200
        assert not waiting.done()
        go_on.set()
        assert (await waiting).status == 200


class TestStaticFiles:
    @pytest.mark.parametrize(
        ("path", "kind"), [("/", "text/html"), ("/main.js", "text/javascript"), ("/style.css", "text/css")]
    )
    async def test_the_page_needs_no_token(self, client, path, kind) -> None:
        answer = await client.get(path)
        assert (answer.status, answer.content_type) == (200, kind)

    @pytest.mark.parametrize(
        "path", ["/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "/static/main.js", "/app.py", "/none.js"]
    )
    async def test_no_other_file_is_served(self, client, path) -> None:
        assert (await client.get(path)).status == 404
