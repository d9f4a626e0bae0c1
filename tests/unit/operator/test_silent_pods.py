"""When a pod that others miss is unreachable, and when others miss it: by what comes of asking the agents."""

import json
from collections.abc import Callable

import aiohttp
import pytest

from disttrain_api.report import STOPPED
from disttrain_operator.agent_client import STACKS_PATH, STATUS_PATH, Agent
from disttrain_operator.agent_http import Unreachable
from disttrain_operator.decide.observed import Live
from disttrain_operator.silent_pods import LEAST_ASKED, SILENT_SECONDS, SilentPods
from tests.builders import UID
from tests.unit.operator.agent_fleet import STACKS, Fleet, a_pod
from tests.unit.operator.test_gang_stacks import Gangs
from tests.unit.operator.test_suspicion import Still, a_still_answer

POD = a_pod(1, 1)["metadata"]["uid"]
APART = SILENT_SECONDS / (LEAST_ASKED - 1)


class Silent(Fleet):
    """A job of two pods, of which the first one's agent misses the second, at whose address nothing answers."""

    def __init__(self) -> None:
        super().__init__(a_pod(), a_pod(1, 1))
        self.world.snapshot(UID)
        self.live: Live | None = Live("uid", 1, None, awaited=frozenset({1}))
        self.now, self.indices = 0.0, list[int]()
        self.outcome: Exception | None = Unreachable()
        self.silent = SilentPods(
            self.world, str, lambda uid: self.live, self.woken.append, lambda: True, clock=lambda: self.now
        )

    async def ask(self, agent: Agent, token: str, path: str) -> bytes:
        self.indices.append(agent.index)
        if self.outcome is not None:
            raise self.outcome
        return b"{}"

    async def looks(self, times: int, apart: float = APART) -> bool:
        """Whether the pod is unreachable, and nobody else, after so many more looks."""
        for _ in range(times):
            await self.silent.round(self.ask)
            self.now += apart
        found = self.silent.unreachable(UID)
        assert found <= {POD}
        return bool(found)


async def test_a_pod_that_is_missed_is_unreachable_when_nothing_has_answered_for_a_while() -> None:
    fleet = Silent()
    assert not await fleet.looks(LEAST_ASKED - 1)
    assert await fleet.looks(1)
    assert (fleet.indices, fleet.woken) == ([1] * LEAST_ASKED, [UID])
    assert await fleet.looks(2)
    assert fleet.woken == [UID], "nothing new"


@pytest.mark.parametrize(("times", "apart"), [(10 * LEAST_ASKED, 0.0), (LEAST_ASKED - 1, SILENT_SECONDS)])
async def test_it_takes_some_looks_and_some_time(times: int, apart: float) -> None:
    assert not await Silent().looks(times, apart)


@pytest.mark.parametrize("outcome", [None, TimeoutError(), ConnectionRefusedError(), aiohttp.ClientError()], ids=repr)
async def test_a_node_that_answers_in_any_way_lives(outcome: Exception | None) -> None:
    """Its processes may be stopped, and go on: then the kernel takes connections that nobody answers."""
    fleet = Silent()
    fleet.outcome = outcome
    assert not await fleet.looks(3 * LEAST_ASKED)
    fleet.outcome = Unreachable()
    assert await fleet.looks(LEAST_ASKED)
    fleet.outcome = outcome
    assert not await fleet.looks(1), "it is back"


async def test_nobody_is_asked_where_nobody_is_missed() -> None:
    fleet = Silent()
    fleet.live = Live("uid", 1, None)
    assert not await fleet.looks(LEAST_ASKED)
    assert fleet.indices == []
    fleet.live = Live("uid", 1, None, missing=frozenset({1}))
    assert await fleet.looks(LEAST_ASKED)
    fleet.live = Live("uid", 1, None)
    assert not await fleet.looks(1), "its gang gets on"


async def test_what_the_last_agent_has_said_counts_after_its_pod_has_ended() -> None:
    fleet = Silent()
    await fleet.looks(1)
    fleet.live = None
    assert await fleet.looks(LEAST_ASKED - 1)
    none = Silent()
    none.live = None
    assert not await none.looks(LEAST_ASKED)


def gone(fleet: Still, *indices: int) -> None:
    """Nothing answers at the addresses of these pods."""
    former = fleet.answers

    def answers(agent: Agent) -> bytes:
        if agent.index in indices:
            raise Unreachable
        return former(agent)

    fleet.answers = answers


async def missing(fleet: Still) -> set[int]:
    live = await fleet.round()
    return set() if live is None else set(live.missing)


async def test_a_pod_is_missed_where_nothing_answers_and_the_ranks_of_the_others_wait() -> None:
    fleet = Still()
    gone(fleet, 1)
    assert await missing(fleet) == {1}
    live = fleet.agents.live(UID)
    assert live is not None
    assert live.suspicion is None
    fleet.still = {0: 0.5, 1: 0.5}
    assert await missing(fleet) == set(), "a step has ended: only the operator does not reach it"


async def test_the_first_pod_is_missed_as_any_other() -> None:
    """Red where another agent is asked only once Kubernetes has noticed."""
    fleet = Still()
    await fleet.round()
    waits, fleet.stacks = fleet.stacks, lambda agent: waits(agent).replace(b'"0"', b'"1"')
    fleet.blamed = json.loads(STACKS)["stacks"]["0"].replace("/a/", "/torch/distributed/")
    gone(fleet, 0)
    live = await fleet.watch()
    assert live is not None
    assert (live.pod_uid, live.missing) == (POD, {0})


def takes_steps(fleet: Still) -> None:
    fleet.still = {0: 0.5, 1: 0.5}


def computes(fleet: Still) -> None:
    fleet.stacks = lambda agent: STACKS


def is_stopped(fleet: Still) -> None:
    fleet.stacks = lambda agent: json.dumps({"stacks": {"0": STOPPED}}).encode()


def tells_nothing(fleet: Still) -> None:
    fleet.stacks = lambda agent: b"{}"


@pytest.mark.parametrize("why", [takes_steps, computes, is_stopped, tells_nothing])
async def test_nobody_is_missed_where_a_rank_does_anything_else_than_wait(why: Callable[[Still], None]) -> None:
    """A slow sample stops all ranks for a while, and the network between the operator and one node may be at fault."""
    fleet = Still()
    gone(fleet, 1)
    why(fleet)
    assert await missing(fleet) == set()


async def test_nobody_is_missed_where_an_agent_is_there_and_does_not_answer() -> None:
    fleet = Still()

    def answers(agent: Agent) -> bytes:
        if agent.index:
            raise TimeoutError
        return a_still_answer(4.5)

    fleet.answers = answers
    assert await missing(fleet) == set()


class OneGone(Gangs):
    """A gang of four, of which the last pod is gone; a test says what becomes of questions to the third."""

    def __init__(self) -> None:
        super().__init__(1, 4)
        self.third: dict[str, bytes | Exception] = {}

    async def ask(self, agent: Agent, token: str, path: str) -> bytes:
        if agent.index == 3:
            raise Unreachable
        if agent.index == 2 and (answer := self.third.get(path)) is not None:
            if isinstance(answer, Exception):
                raise answer
            return answer
        return await super().ask(agent, token, path)

    async def missing(self) -> frozenset[int]:
        return await self.stacks.missing(self.first(self.uids[0]), self.ask)


async def test_what_all_others_do_counts() -> None:
    gang = OneGone()
    assert await gang.missing() == {3}
    for path, answer in [(STATUS_PATH, TimeoutError()), (STATUS_PATH, b"{}"), (STACKS_PATH, b"{}")]:
        gang.third = {path: answer}
        assert await gang.missing() == set(), (path, answer)
    gang.third = {STATUS_PATH: Unreachable()}
    assert await gang.missing() == {2, 3}
