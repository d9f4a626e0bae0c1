"""Asking agents through the API server, which a test plays: what is sent, and what a pod's answer can do."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from disttrain_api.names import AGENT_PORT, CHECKPOINT_PATH, LEADER_PATH, TOKEN_HEADER
from disttrain_api.report import MAX_AGENT_ANSWER_BYTES
from disttrain_operator.__main__ import Operator
from disttrain_operator.agent_client import STACKS_PATH, STATUS_PATH, Agent, ApiServerProxy, agent_of, ask_directly
from disttrain_operator.agent_http import NoAnswer
from disttrain_operator.kept_pod import keep_pod
from disttrain_operator.kube.auth import Access, ClientCertificate, Credentials
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import TooLarge
from disttrain_operator.preflight import log_missing_proxy_rights, missing_proxy_rights
from disttrain_operator.settings import read_settings
from tests.builders import UID
from tests.unit.operator.agent_fleet import Fleet, a_pod, an_answer
from tests.unit.operator.fake_api import FakeApi, Raw, refusal

POD = "/api/v1/namespaces/team/pods/job-worker-0"
Answers = Callable[[web.Request], Any]


class Watched(Credentials):
    """A token; counts how often it was refused."""

    refusals = 0

    def refused(self) -> None:
        self.refusals += 1


@asynccontextmanager
async def proxied(answers: Answers) -> AsyncIterator[tuple[ApiServerProxy, Access]]:
    """An API server that passes everything on to `answers`, and the way of asking through it."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answers)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    # By a name: cookies of addresses are not kept by any jar.
    await web.TCPSite(runner, "localhost", 0).start()
    access = Access(f"http://localhost:{runner.addresses[0][1]}", Watched("the operator's"))
    proxy = ApiServerProxy(access)
    try:
        yield proxy, access
    finally:
        await proxy.close()
        await runner.cleanup()


def an_agent(**changes: Any) -> Agent:
    pod = a_pod()
    pod["metadata"] |= {"namespace": "team", "name": "job-worker-0"} | changes
    agent = agent_of(UID, keep_pod(pod))
    assert agent is not None
    return agent


async def test_an_agent_is_asked_by_its_pods_name_with_its_token_beside_the_operators() -> None:
    seen = list[tuple[str, str, str | None, str | None]]()

    async def answers(request: web.Request) -> web.Response:
        header = request.headers
        seen.append((request.method, request.raw_path, header.get("Authorization"), header.get(TOKEN_HEADER)))
        return web.Response(body=an_answer())

    async with proxied(answers) as (proxy, _):
        for path in (STATUS_PATH, STACKS_PATH, CHECKPOINT_PATH):
            assert await proxy.ask(an_agent(), "t", path) == an_answer()
        await proxy.ask(an_agent(namespace="a/b", name="../../secrets/x?a#b:1"), "t", STATUS_PATH)
    bearer = "Bearer the operator's"
    assert seen[:3] == [
        ("GET", f"{POD}:{AGENT_PORT}/proxy/v1/status", bearer, "t"),
        ("GET", f"{POD}:{AGENT_PORT}/proxy/v1/stacks?thread=main", bearer, "t"),
        ("POST", f"{POD}:{AGENT_PORT}/proxy/v1/checkpoint", bearer, "t"),
    ]
    named = f"/api/v1/namespaces/a%2Fb/pods/..%2F..%2Fsecrets%2Fx%3Fa%23b%3A1:{AGENT_PORT}/proxy/v1/status"
    assert seen[3] == ("GET", named, bearer, "t")


@pytest.mark.parametrize("code", [301, 400, 401, 403, 404, 409, 410, 429, 500, 503, 504])
async def test_a_refusal_costs_the_figures_alone(code: int) -> None:
    """Whether a pod or the API server refuses. Red where a redirect is followed, where the credentials are taken for
    refused, and where the operator's client waits or counts."""

    async def answers(request: web.Request) -> web.Response:
        if "/proxy/" in request.path:
            headers = {"Retry-After": "3600", "Location": "/elsewhere"}
            return refusal(code, "Unauthorized", "Unauthorized", headers)
        return web.json_response({"at": request.path})

    async with proxied(answers) as (proxy, access):
        fleet, client, answered = Fleet(a_pod()), Client(access, retry_delays=()), list[int]()
        client.on_answer = lambda method, code, seconds: answered.append(code)
        assert await fleet.round(proxy.ask) is None
        assert fleet.agents.counts["agent_failures"] == 1
        assert access.credentials.refusals == 0  # type: ignore[attr-defined]
        assert await client.get("/elsewhere") == {"at": "/elsewhere"}
        assert answered == [200]
        await client.close()


@pytest.mark.parametrize(("code", "refuses"), [(404, True), (409, True), (429, False), (503, False)])
async def test_an_agent_that_refuses_is_not_taken_for_one_that_is_not_reached(code: int, refuses: bool) -> None:
    """An address of worker 0 is said again to an agent that is not reached, and once to one that wants none."""

    async def answers(request: web.Request) -> web.Response:
        return refusal(code, "Conflict", "Conflict", {})

    async with proxied(answers) as (proxy, _):
        with pytest.raises(NoAnswer if refuses else aiohttp.ClientError):
            await proxy.ask(an_agent(), "t", LEADER_PATH)


async def test_a_pod_plants_no_cookie_at_the_api_servers_address() -> None:
    seen = list[str | None]()

    async def answers(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Cookie"))
        return web.Response(body=an_answer(), headers={"Set-Cookie": "a=" + "b" * 4000 + "; Path=/"})

    async with proxied(answers) as (proxy, _):
        for _ in range(2):
            await proxy.ask(an_agent(), "t", STATUS_PATH)
    assert seen == [None, None]


async def test_an_answer_has_its_bounds_of_bytes_and_time() -> None:
    """Red without either bound: the last answer never ends."""
    asking = asyncio.Event()

    async def answers(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b"{")
        if request.headers[TOKEN_HEADER] == "silent":
            await asking.wait()
        for _ in range(2 * MAX_AGENT_ANSWER_BYTES // 65536):
            await stream.write(b" " * 65536)
        return stream

    async with proxied(answers) as (proxy, access):
        for path in (STATUS_PATH, STACKS_PATH):
            with pytest.raises(TooLarge, match="larger than"):
                await proxy.ask(an_agent(), "long", path)
        hurried = ApiServerProxy(access, seconds=0.05)
        with pytest.raises(TimeoutError):
            await hurried.ask(an_agent(), "silent", STATUS_PATH)
        asking.set()
        await hurried.close()


async def test_a_certificate_that_was_renewed_is_used() -> None:
    """Red where the first TLS context is kept for good, and where each request makes one."""
    made = list[ClientCertificate | None]()

    class Renewed(Credentials):
        current = ClientCertificate("first", "key")

        def certificate(self) -> ClientCertificate:
            return self.current

    class Tls(Access):
        def ssl_context(self) -> None:
            made.append(self.credentials.certificate())

    async def answers(request: web.Request) -> web.Response:
        return web.Response(body=an_answer())

    async with proxied(answers) as (_, access):
        credentials = Renewed()
        proxy = ApiServerProxy(Tls(access.server, credentials))
        for certificate in ("first", "first", "second", "second"):
            credentials.current = ClientCertificate(certificate, "key")
            await proxy.ask(an_agent(), "t", STATUS_PATH)
        await proxy.close()
    assert [one.certificate for one in made if one is not None] == ["first", "second"]


@pytest.mark.parametrize(
    ("flags", "in_pod", "proxied"),
    [
        ([], False, True),
        ([], True, False),
        (["--agent-access=Auto"], False, True),
        (["--agent-access=PodIP"], False, False),
        (["--agent-access=ApiServer"], True, True),
        (["--progress-interval-seconds=0"], False, False),
    ],
)
async def test_the_way_to_agents_is_that_to_the_api_server_unless_a_flag_says_otherwise(
    flags: list[str], in_pod: bool, proxied: bool, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the way, its rights are asked for: the chart's operator has none to `pods/proxy` and needs none."""
    client = Client(Access(api.url, in_pod=in_pod))
    operator = Operator(
        read_settings([*flags, "--health-address=127.0.0.1", "--health-port=0"], {}), client, None, b"k"
    )
    asked = list[str]()
    api.refusals.append(lambda method, path, body: answered(body, asked, may=True))
    await operator.prepare()
    await operator.close()
    await client.close()
    assert [one for one in asked if "proxy" in one] == (["get pods/proxy", "create pods/proxy"] if proxied else [])
    assert (operator._agents._ask_with is not ask_directly) == proxied
    assert (operator._silent_pods is None) == proxied, "through the API server no pod is taken for unreachable"


def answered(body: Raw | None, asked: list[str], *, may: bool) -> web.Response | None:
    """Whether one may, where that is the question."""
    if body is None or body.get("kind") != "SelfSubjectAccessReview":
        return None
    about = body["spec"]["resourceAttributes"]
    asked.append(f"{about['verb']} {about['resource']}" + (f"/{about['subresource']}" if about["subresource"] else ""))
    return web.json_response({"status": {"allowed": may}}, status=201)


async def test_rights_that_are_missing_are_named_in_one_line_of_their_own(
    api: FakeApi, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Without them jobs run, which the line on other rights denies."""
    asked = list[str]()
    api.refusals.append(lambda method, path, body: answered(body, asked, may=False))
    log_missing_proxy_rights(await missing_proxy_rights(client, ("a", "b")))
    (line,) = caplog.messages
    named = "get pods/proxy in a, create pods/proxy in a, get pods/proxy in b, create pods/proxy in b"
    assert line == f"I ask agents through the API server, and may not: {named}; jobs show no progress until I may"
    log_missing_proxy_rights([])
    assert len(caplog.messages) == 1
