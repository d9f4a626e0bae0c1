"""The operator's questions to the agents of a local run: where they go, and what is taken from the answers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from disttrain.local import hangs
from disttrain.local.hangs import HangWatch
from disttrain_api.names import AGENT_PORT, CONTAINER, RESTART_PATH, Env
from disttrain_api.report import RankFailure, RestartsInPlace
from disttrain_operator.agent_client import Agent
from disttrain_operator.agent_http import Unreachable
from disttrain_operator.decide.decision import RestartInPlace
from disttrain_operator.decide.live import Blame, Live, Suspicion
from tests.builders import NOW, a_job, a_raw_job, a_raw_pod, running

UID = a_raw_job()["metadata"]["uid"]
SUSPICION = Suspicion(Blame(1, "is stopped by a signal"), 4.0, 0.2, 0.3)
ONCE = RestartsInPlace(count=1, time="2026-01-01T12:00:00Z", failure=RankFailure(rank=1, exit_code=137))


def a_pod(port: int | None = 4321, index: int = 0) -> dict[str, Any]:
    """A pod of this machine that runs; port: of its agent."""
    pod = running(a_raw_pod(a_job(), index=index))
    env = [] if port is None else [{"name": Env.AGENT_PORT, "value": str(port)}]
    pod["spec"]["containers"] = [{"name": CONTAINER, "env": env}]
    return pod


def watch(*pods: dict[str, Any]) -> HangWatch:
    found = HangWatch("token", lambda: None)
    found.see(a_raw_job(), pods)
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, str]]:
    """Where questions went, and their paths."""
    found: list[tuple[str, int, str]] = []

    async def ask(agent: Agent, token: str, path: str) -> bytes:
        assert token == "token"
        found.append((agent.host, agent.port, path.partition("?")[0]))
        if agent.port == 1:
            raise Unreachable
        return b"{}"

    monkeypatch.setattr(hangs, "ask_directly", ask)
    return found


def order(pod: dict[str, Any]) -> RestartInPlace:
    return RestartInPlace(pod["metadata"]["uid"], 1, 0, 5, 1, NOW)


async def test_an_order_goes_to_the_port_of_the_pods_agent_on_this_machine(asked: list[tuple[str, int, str]]) -> None:
    pod = a_pod()
    seen = watch(pod, a_pod(4322, 1))
    await seen.give(UID, order(pod))
    assert asked == [("127.0.0.1", 4321, RESTART_PATH)]
    given = seen.order(UID)
    assert given is not None
    assert (given.given, given.refused) == (order(pod), None)


@pytest.mark.parametrize(
    ("after", "refused"),
    [
        (list, "worker 0's pod is gone"),
        (lambda: [a_pod(None)], "worker 0's pod is gone"),
        (lambda: [a_pod(1)], "worker 0's agent: TimeoutError"),
    ],
    ids=["its pod has ended", "it has no agent", "it has too many connections that it has not taken"],
)
async def test_an_order_that_nobody_follows_is_refused(
    asked: list[tuple[str, int, str]], after: Callable[[], list[dict[str, Any]]], refused: str
) -> None:
    pod = a_pod()
    seen = watch(pod)
    seen.see(a_raw_job(), after())
    await seen.give(UID, order(pod))
    given = seen.order(UID)
    assert given is not None
    assert given.refused == refused


@pytest.mark.parametrize(
    ("of_itself", "counts"),
    [({}, True), ({"attempt": 2}, False), ({"restarts_in_place": ONCE}, False)],
    ids=["of this life", "of another attempt", "of a former life"],
)
def test_what_agents_say_of_a_gang_counts_for_the_life_of_its_ranks(
    monkeypatch: pytest.MonkeyPatch, of_itself: dict[str, Any], counts: bool
) -> None:
    seen, known = watch(a_pod()), Live("u", 1, None, suspicion=SUSPICION, silent=frozenset({1}))
    monkeypatch.setattr(seen._agents, "live", lambda _: known)
    own = Live("u", **{"attempt": 1, "report": None, **of_itself})
    heard = seen.heard(UID, own, frozenset({2}))
    expected = {"suspicion": SUSPICION, "silent": frozenset({1})} if counts else {}
    assert heard == replace(own, awaited=frozenset({2}), **expected)
    assert seen.heard(UID, None, frozenset()) is None


def test_a_pod_stands_where_an_operator_looks_for_agents() -> None:
    pod = a_pod()
    seen = hangs._as_in_a_cluster(pod)
    assert hangs._agent_port(seen) == AGENT_PORT
    assert hangs._agent_port(pod) == 4321, "it is as it was"
