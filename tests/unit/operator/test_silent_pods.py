"""When a pod that others miss is unreachable, and when others miss it: by what comes of asking the agents."""

import asyncio
import json
from collections.abc import Callable

import aiohttp
import pytest

from disttrain_api.stacks import STOPPED
from disttrain_operator.agent_client import CONNECT_SECONDS, STACKS_PATH, STATUS_PATH, Agent
from disttrain_operator.agent_http import Unreachable
from disttrain_operator.decide.live import Live
from disttrain_operator.silent_pods import (
    LEAST_ASKED,
    SILENT_SECONDS,
    UNANSWERED_SECONDS,
    UNSEEN_SECONDS,
    SilentPods,
)
from tests.builders import UID
from tests.unit.operator.agent_fleet import STACKS, Fleet, a_pod
from tests.unit.operator.clocked_loop import JumpingLoop
from tests.unit.operator.test_false_alarms_of_gangs import a_pod_of_many
from tests.unit.operator.test_gang_stacks import Gangs
from tests.unit.operator.test_suspicion import Still, a_still_answer

POD = a_pod(1, 1)["metadata"]["uid"]
WAITS = json.loads(STACKS)["stacks"]["0"].replace("/a/", "/torch/distributed/")
APART = SILENT_SECONDS / (LEAST_ASKED - 1)


class Silent(Fleet):
    """A job of two pods, of which the first one's agent misses the second, at whose address nothing answers."""

    def __init__(self) -> None:
        super().__init__(a_pod(), a_pod(1, 1))
        self.world.snapshot(UID)
        self.live: Live | None = Live("uid", 1, None, awaited=frozenset({1}))
        self.now, self.indices = 0.0, list[int]()
        self.outcome: Exception | None = Unreachable()
        self.first: Exception | None = TimeoutError()
        """What comes of asking the first pod, on the same node."""
        self.silent = SilentPods(
            self.world, str, lambda uid: self.live, self.woken.append, lambda: True, clock=lambda: self.now
        )

    async def ask(self, agent: Agent, token: str, path: str) -> bytes:
        self.indices.append(agent.index)
        outcome = self.outcome if agent.index else self.first
        if outcome is not None:
            raise outcome
        return b"{}"

    async def looks(self, times: int, apart: float = APART) -> bool:
        """Whether the pod is unreachable, and nobody else, after so many more looks."""
        for _ in range(times):
            await self.silent.round(self.ask)
            self.now += apart
        found = self.silent.unreachable(UID)
        assert found <= {POD}
        return bool(found)

    async def silent_after(self, most: float = 2 * UNSEEN_SECONDS, apart: float = 3.0) -> float | None:
        """After how many seconds of such looks the pod is silent; None: it is not after `most`."""
        began = self.now
        while self.now - began <= most:
            assert not await self.looks(1, apart)
            if self.silent.silent(UID):
                assert self.silent.silent(UID) == {POD}
                return self.now - apart - began
        return None


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


async def test_a_pod_that_is_missed_is_silent_after_half_a_minute_where_another_one_of_its_node_answers() -> None:
    fleet = Silent()
    fleet.outcome, fleet.first = TimeoutError(), None
    assert await fleet.silent_after() == pytest.approx(UNANSWERED_SECONDS)
    assert (fleet.indices.count(0), fleet.woken) == (1, [UID])
    fleet.outcome = None
    assert await fleet.silent_after() is None, "it goes on"


@pytest.mark.parametrize("first", [TimeoutError(), Unreachable(), ConnectionRefusedError()], ids=repr)
async def test_a_pod_of_whose_node_nothing_else_answers_is_silent_once_kubernetes_had_noticed(
    first: Exception,
) -> None:
    """Red where half a minute is enough: the whole node may be stopped, and go on."""
    fleet = Silent()
    fleet.outcome, fleet.first = TimeoutError(), first
    assert await fleet.silent_after() == pytest.approx(UNSEEN_SECONDS)


async def test_a_pod_of_another_node_says_nothing_of_the_node() -> None:
    fleet = Silent()
    fleet.outcome, fleet.first = TimeoutError(), None
    elsewhere = a_pod()
    elsewhere["metadata"]["resourceVersion"], elsewhere["spec"]["nodeName"] = "6", "node2"
    fleet.world.pods.observe(elsewhere)
    fleet.world.snapshot(UID)
    assert await fleet.silent_after() == pytest.approx(UNSEEN_SECONDS)


async def test_a_node_that_is_stopped_as_a_whole_is_left_to_kubernetes() -> None:
    """Red where a pod counts whose node is not ready, or what was before it came back."""
    fleet = Silent()
    fleet.outcome = TimeoutError()
    assert await fleet.silent_after(40.0) is None
    for version, ready in (("6", "False"), ("7", "True")):
        pod = a_pod(1, 1, conditions=[{"type": "Ready", "status": ready}])
        pod["metadata"]["resourceVersion"] = version
        fleet.world.pods.observe(pod)
        fleet.world.snapshot(UID)
        if ready == "False":
            assert await fleet.silent_after(1500.0) is None
    assert await fleet.silent_after() == pytest.approx(UNSEEN_SECONDS)


async def test_an_agent_that_answers_now_and_then_is_slow() -> None:
    fleet = Silent()
    fleet.first = None
    for _ in range(20):
        fleet.outcome = TimeoutError()
        assert await fleet.silent_after(UNANSWERED_SECONDS - 6.0) is None
        fleet.outcome = None
        await fleet.looks(1)


def test_one_that_does_not_answer_keeps_no_round_waiting() -> None:
    """Red where it has the five seconds of a question for figures."""
    fleet, loop = Silent(), JumpingLoop()

    async def never(agent: Agent, token: str, path: str) -> bytes:
        await asyncio.sleep(60)
        return b"{}"

    began = loop.now
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(fleet.silent.round(never))
    assert loop.now - began == pytest.approx(CONNECT_SECONDS + 0.5)


@pytest.mark.parametrize("outcome", [None, TimeoutError(), ConnectionRefusedError(), aiohttp.ClientError()], ids=repr)
async def test_a_node_is_not_dead_that_answers_in_any_way(outcome: Exception | None) -> None:
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


def stopped(fleet: Still, *indices: int) -> None:
    """A signal has stopped all processes of these pods: their kernels take connections."""

    def answers(agent: Agent) -> bytes:
        if agent.index in indices:
            raise TimeoutError
        return a_still_answer(fleet.still[agent.index], agent.index)

    def stacks(agent: Agent) -> bytes:
        if agent.index in indices:
            raise TimeoutError
        return json.dumps({"stacks": {str(agent.index): WAITS}}).encode()

    fleet.answers, fleet.stacks = answers, stacks


@pytest.mark.parametrize("victim", [0, 1])
async def test_the_agent_of_a_stopped_pod_is_silent_and_its_rank_is_named_after_a_minute(victim: int) -> None:
    """Red where only an address at which nothing answers has another agent asked in place of the first worker's."""
    fleet = Still()
    fleet.still = {0: 0.5, 1: 0.5}
    await fleet.round()
    stopped(fleet, victim)
    fleet.still = {0: 20.0, 1: 20.0}
    live = await fleet.round()
    assert live is not None
    assert (live.missing, live.silent, live.suspicion) == (set(), {victim}, None)
    assert live.pod_uid == (POD if victim == 0 else a_pod()["metadata"]["uid"])
    fleet.still = {0: 66.0, 1: 66.0}
    live = await fleet.round()
    assert live is not None
    assert live.suspicion is not None
    blame, other = live.suspicion.blame, 1 - victim
    assert (blame.rank, blame.certain) == (victim, False)
    assert blame.why == f"does not answer, and rank {other} waits in all_reduce (b.py:3)"
    fleet.still = {0: 0.5, 1: 0.5}
    live = await fleet.round()
    assert live is not None
    assert (live.silent, live.suspicion) == (set(), None), "the others take steps: only its agent is stopped"


async def test_a_rank_that_was_named_stays_so_when_the_agent_of_the_first_worker_is_stopped_after_it() -> None:
    fleet = Still()
    live = await fleet.round()
    assert live is not None
    assert live.suspicion is not None
    former = live.suspicion
    stopped(fleet, 0)
    live = await fleet.round()
    assert live is not None
    assert (live.pod_uid, live.silent, live.suspicion) == (POD, {0}, former)


async def test_the_deadline_of_a_job_counts_by_another_agent_where_that_of_the_first_worker_is_stopped() -> None:
    """Red where the answer of another agent is looked at for whom it waits alone."""
    fleet = Still(runPolicy={"progressDeadlineSeconds": 100})
    fleet.still = {0: 0.5, 1: 0.5}
    await fleet.round()
    fleet.still = {0: 20.0, 1: 20.0}
    stopped(fleet, 0)
    by_signal, step, seconds = fleet.answers, 6, 99.0

    def answers(agent: Agent) -> bytes:
        found = json.loads(by_signal(agent))
        found["ranks"][0]["secondsSinceStep"] = seconds
        found["ranks"][0]["report"] |= {"step": step, "rank": agent.index}
        return json.dumps(found).encode()

    fleet.answers = answers
    live = await fleet.round()
    assert live is not None
    assert live.report is not None
    assert (live.report.rank, live.report.step, live.stall) == (0, 6, None), "the job's figures, a step later"
    seconds = 100.0
    live = await fleet.round()
    assert live is not None
    assert live.stall is not None
    assert live.stall.blame is not None
    assert (live.stall.rank, live.stall.seconds, live.stall.blame.rank) == (1, 100.0, 0)
    assert live.stall.blame.why.startswith("does not answer, and rank 1 waits in all_reduce")


async def test_the_next_agent_is_asked_where_those_of_two_workers_are_stopped() -> None:
    gang = Fleet(*map(a_pod_of_many, range(3)), workers={"replicas": 3})

    def answers(agent: Agent) -> bytes:
        if agent.index < 2:
            raise TimeoutError
        return a_still_answer(0.5, 2)

    gang.answers = answers
    live = await gang.round()
    assert [agent.index for agent, _ in gang.asked] == [0, 1, 2]
    assert live is not None
    assert live.pod_uid == "uid-2"


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

    async def absent(self) -> tuple[set[int], set[int]]:
        found = await self.stacks.absent(self.first(self.uids[0]), self.ask)
        return set(found.missing), set(found.silent)


async def test_what_all_others_do_counts() -> None:
    gang = OneGone()
    assert await gang.absent() == ({3}, set())
    for path, answer in [(STATUS_PATH, aiohttp.ClientError()), (STATUS_PATH, b"{}"), (STACKS_PATH, b"{}")]:
        gang.third = {path: answer}
        assert await gang.absent() == (set(), set()), (path, answer)
    gang.third = {STATUS_PATH: Unreachable()}
    assert await gang.absent() == ({2, 3}, set())
    gang.third = {STATUS_PATH: TimeoutError()}
    assert await gang.absent() == ({3}, {2})
