"""Whom the operator tells where worker 0's pod is, and how often."""

import asyncio
from typing import Any

import pytest

from disttrain_api.agent_api import LEADER
from disttrain_api.agent_token import agent_token
from disttrain_api.leader_address import address_proof
from disttrain_api.names import Env, Label
from disttrain_operator.agent_client import Agent
from disttrain_operator.agent_http import NoAnswer, Refused, Unreachable
from disttrain_operator.leader_addresses import MOST, MOST_TRIES, LeaderAddresses
from disttrain_operator.plan.identity import pod_name
from tests.builders import UID, a_raw_job, awaiting_address
from tests.unit.operator.agent_fleet import Fleet, a_pod

Raw = dict[str, Any]


def worker(index: int, attempt: int = 1) -> Raw:
    """A pod that began with its attempt."""
    pod = a_pod(attempt, min(index, 1), f"10.0.1.{index}")
    pod["metadata"] |= {"uid": f"worker-{index}"}
    pod["metadata"]["labels"] = pod["metadata"]["labels"] | {Label.INDEX: str(index)}
    return pod


def waiting(index: int) -> Raw:
    """A pod whose agent waits for the address of worker 0."""
    pod = worker(index)
    waits = awaiting_address(pod)
    waits["spec"]["containers"][0]["env"] = pod["spec"]["containers"][0]["env"]
    waits["status"]["podIP"] = pod["status"]["podIP"]
    return waits


def announced(address: str, replacement: int) -> tuple[str, str, str]:
    """The query of an announcement. Its proof shows that the operator makes it."""
    proof = address_proof(f"token of {UID}", UID, 1, address, replacement)
    return f"address={address}", f"replacement={replacement}", f"proof={proof}"


def in_place_of(index: int, replacement: int, host: str = "10.0.0.99", attempt: int = 1, **status: Any) -> Raw:
    """A pod that the operator has made in place of a lost one."""
    pod = a_pod(attempt, index, host, **status)
    pod["metadata"] |= {"uid": f"replacement-{index}-{replacement}", "resourceVersion": "6"}
    pod["spec"]["containers"][0]["env"].append({"name": Env.REPLACEMENT, "value": str(replacement)})
    return pod


class Told(Fleet):
    """A job of three pods, in which pods were lost."""

    def __init__(self, *pods: Raw, lost: tuple[int, ...] = (0,)) -> None:
        super().__init__(*pods)
        names = [pod_name("digits", UID, "worker", index, 1) for index in lost]
        entries = [
            {"pod": name, "uid": "former", "time": "2026-01-01T12:00:00Z", "reason": "PodLost"} for name in names
        ]
        attempts = [{"number": 1, "startTime": "2026-01-01T11:00:00Z", "replacements": entries}]
        raw = a_raw_job(status={"attempt": 1, "attempts": attempts})
        raw["metadata"]["resourceVersion"] = "5"
        self.world.jobs.observe(raw)
        self.world.snapshot(UID)
        self.heard: list[tuple[Any, ...]] = []
        self.outcome: dict[int, Exception] = {}
        self.addresses = LeaderAddresses(self.world, lambda uid: f"token of {uid}", lambda: True, self.hear)

    async def hear(self, agent: Agent, token: str, path: str) -> bytes:
        assert token == agent_token(f"token of {UID}")
        operation, _, query = path.partition("?")
        assert operation == LEADER.path
        self.heard.append((agent.index, *query.split("&")))
        if agent.index in self.outcome:
            raise self.outcome[agent.index]
        return b'{"known": true}'

    async def rounds(self, count: int = 1) -> list[tuple[Any, ...]]:
        """What agents were told in so many rounds."""
        self.heard.clear()
        for _ in range(count):
            async with asyncio.TaskGroup() as tasks:
                await self.addresses.round(tasks)
        return sorted(self.heard)


async def test_each_agent_hears_once_where_worker_0s_new_pod_is() -> None:
    fleet = Told(in_place_of(0, 3), worker(1), worker(2))
    query = announced("10.0.0.99", 3)
    assert await fleet.rounds() == [(1, *query), (2, *query)]
    assert await fleet.rounds(5) == []
    fleet.world.pods.observe_deleted(in_place_of(0, 3))
    fleet.world.pods.observe(in_place_of(0, 7, "fd00::7"))
    query = announced("fd00::7", 7)
    assert await fleet.rounds(2) == [(1, *query), (2, *query)], "it was lost again"


async def test_agents_that_wait_hear_where_worker_0_is_also_its_own() -> None:
    """Red where agents hear it again, or those that have started their ranks."""
    fleet = Told(waiting(0), waiting(1), worker(2), lost=())
    query = announced("10.0.1.0", 0)
    assert await fleet.rounds() == [(0, *query), (1, *query)]
    assert await fleet.rounds(5) == []
    fleet.world.pods.observe(waiting(2) | {"metadata": waiting(2)["metadata"] | {"resourceVersion": "9"}})
    fleet.world.snapshot(UID)
    assert await fleet.rounds() == [(2, *query)], "its container has started again"


async def test_who_waits_while_worker_0_was_replaced_hears_of_the_new_pod() -> None:
    fleet = Told(in_place_of(0, 3), waiting(1))
    assert await fleet.rounds() == [(1, *announced("10.0.0.99", 3))]


async def test_nobody_who_waits_hears_of_a_pod_that_does_not_run_yet() -> None:
    pod = worker(0)
    pod["status"]["phase"] = "Pending"
    assert await Told(pod, waiting(1), lost=()).rounds() == []


@pytest.mark.parametrize(
    "pods",
    [
        [worker(1), worker(2)],
        [worker(0), worker(1)],
        [in_place_of(0, 3, phase="Pending"), worker(1)],
        [in_place_of(0, 3, host="127.0.0.1"), worker(1)],
        [in_place_of(0, 3, attempt=2), worker(1)],
        [in_place_of(1, 3), worker(0)],
        [in_place_of(0, 3), worker(1, 2)],
        [in_place_of(0, 3)],
    ],
    ids=[
        "none yet",
        "the first one",
        "no address",
        "the operator's",
        "another attempt's",
        "worker 1's",
        "to others",
        "alone",
    ],
)
async def test_nobody_is_told_where_there_is_no_such_pod_or_nobody_who_waits_for_it(pods: list[Raw]) -> None:
    assert await Told(*pods).rounds() == []


async def test_who_does_not_answer_is_told_again_for_a_while_and_keeps_nobody_waiting() -> None:
    fleet = Told(in_place_of(0, 3), worker(1), worker(2))
    fleet.outcome = {1: Unreachable()}
    assert len(await fleet.rounds(3)) == 3 + 1
    del fleet.outcome[1]
    assert len(await fleet.rounds(3)) == 1
    fleet = Told(in_place_of(0, 3), worker(1))
    fleet.outcome = {1: TimeoutError()}
    assert len(await fleet.rounds(2 * MOST_TRIES)) == MOST_TRIES
    fleet = Told(in_place_of(0, 3), worker(1))
    fleet.outcome = {1: NoAnswer("it answers 429")}
    assert len(await fleet.rounds(3)) == 3


async def test_an_agent_that_refuses_is_left_alone() -> None:
    """It follows nobody, has heard of a newer one, or is of an earlier version."""
    fleet = Told(in_place_of(0, 3), worker(1))
    fleet.outcome = {1: Refused("it answers 404")}
    assert len(await fleet.rounds(3)) == 1


async def test_a_job_that_has_lost_no_pod_is_not_looked_into() -> None:
    assert await Told(in_place_of(0, 3), worker(1), lost=()).rounds() == []


@pytest.mark.parametrize(("agents", "at_a_time", "left"), [(MOST + 8, MOST, 8), (2, 2, 0)])
async def test_agents_are_told_at_most_so_many_at_a_time_and_a_round_waits_for_none(
    agents: int, at_a_time: int, left: int
) -> None:
    """Nor is one told again that has not answered yet."""
    fleet = Told(in_place_of(0, 3), *(worker(index) for index in range(1, agents + 1)))
    answered = asyncio.Event()

    async def slow(agent: Agent, token: str, path: str) -> bytes:
        fleet.heard.append((agent.index, "", ""))
        await answered.wait()
        return b"{}"

    fleet.addresses = LeaderAddresses(fleet.world, str, lambda: True, slow)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            await fleet.addresses.round(tasks)
            await asyncio.sleep(0)
        assert len({index for index, *_ in fleet.heard}) == len(fleet.heard) == at_a_time
        answered.set()
    assert len(await fleet.rounds(2)) == left
