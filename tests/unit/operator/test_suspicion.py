"""Asking the agents of ranks that stand still: who is named, how often they are asked, and what names nobody."""

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from disttrain_api.stacks import STOPPED
from disttrain_operator.agent_client import STACKS_PATH, Agent
from disttrain_operator.decide.live import Live
from tests.builders import UID
from tests.unit.operator.agent_fleet import STACKS, Fleet, a_pod, an_answer, refuses
from tests.unit.operator.conftest import eventually


def a_still_answer(still: float, rank: int = 0, step: int = 5) -> bytes:
    """That of a pod whose rank takes steps of a second and has ended none for so long."""
    answer = json.loads(an_answer(phase="Training", step=step))
    pace = {"stillSeconds": still, "medianSeconds": 1.0, "longestSeconds": 1.0}
    answer["ranks"][0] |= {"rank": rank, "pace": pace}
    return json.dumps(answer).encode()


class Still(Fleet):
    """A job of two pods with a rank each. The first waits for the second, which is stopped."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(a_pod(), a_pod(1, 1), **spec)
        self.still = {0: 4.5, 1: 4.5}
        self.blamed = STOPPED
        self.looks: list[int] = []
        self.passed = 0.0
        """Seconds for which the operator has waited while it looked at the gang."""
        self.meanwhile: Callable[[], object] = lambda: None
        """Happens while it waits."""
        self.answers = lambda agent: a_still_answer(self.still[agent.index], agent.index)
        self.stacks = self.look

    def look(self, agent: Agent) -> bytes:
        self.looks.append(agent.index)
        waits = json.loads(STACKS)["stacks"]["0"].replace("/a/", "/torch/distributed/")
        return json.dumps({"stacks": {str(agent.index): self.blamed if agent.index else waits}}).encode()

    async def sleep(self, seconds: float) -> None:
        self.passed += seconds
        for pod in self.still:
            self.still[pod] += seconds
        self.meanwhile()

    async def watch(self, until: float = math.inf) -> Live | None:
        async with asyncio.TaskGroup() as tasks:
            await self.agents.watch(self._ask, tasks, until)
        return self.agents.live(UID)

    async def named(self) -> int | None:
        """The rank that seems to hang, by the next round between those for figures."""
        live = await self.watch()
        return None if live is None or live.suspicion is None else live.suspicion.blame.rank


async def test_ranks_that_stand_still_are_looked_at_twice_between_rounds_and_the_same_rank_stays_named() -> None:
    """Red without: the second look, the memory of what was found, the withdrawal."""
    fleet = Still()
    fleet.still = {0: 0.5, 1: 0.5}
    assert await fleet.named() is None
    assert fleet.asked == [], "before an agent has said that its ranks take steps nobody asks it for that"
    await fleet.round()
    fleet.still = {0: 4.5, 1: 4.5}
    assert await fleet.named() == 1
    assert (sorted(fleet.looks), fleet.woken) == ([0, 0, 1, 1], [UID, UID])
    fleet.still = {0: 90.0, 1: 90.0}
    assert await fleet.named() == 1
    assert (len(fleet.looks), fleet.woken) == (4, [UID, UID]), "it is known, and nothing new"
    live = await fleet.round()
    assert live.suspicion.blame.rank == 1
    fleet.still = {0: 0.5, 1: 0.5}
    assert await fleet.named() is None
    assert fleet.woken == [UID, UID, UID]


async def test_a_rank_that_seems_to_hang_is_found_at_a_short_deadline_between_rounds() -> None:
    """Red where a deadline below a minute counts without a suspicion, or is looked at in rounds for figures alone."""
    fleet = Still(runPolicy={"progressDeadlineSeconds": 10})
    seconds = 9.0

    def answer(agent: Agent) -> bytes:
        found = json.loads(a_still_answer(fleet.still[agent.index], agent.index))
        found["ranks"][0]["secondsSinceStep"] = seconds
        return json.dumps(found).encode()

    fleet.answers = answer
    assert (await fleet.round()).stall is None
    seconds = 10.0
    live = await fleet.watch()
    assert (live.suspicion.blame.rank, live.stall.seconds, live.stall.blame.rank) == (1, 10.0, 1)
    fleet.still = {0: 0.5, 1: 0.5}
    assert (await fleet.watch()).suspicion is None
    live = await fleet.round()
    assert (live.suspicion, live.stall) == (None, None)


async def test_a_round_between_gives_way_to_figures_that_are_due() -> None:
    """Red where it goes on: of 1,000 jobs it takes ten seconds, so figures came in every other ten seconds only."""
    fleet = Still()
    await fleet.round()
    asked = len(fleet.asked)
    await fleet.watch(until=0.0)
    assert len(fleet.asked) == asked
    await fleet.watch()
    assert len(fleet.asked) > asked


async def test_between_rounds_figures_of_a_job_are_no_news() -> None:
    fleet = Still()
    await fleet.round()
    fleet.still = {0: 0.5, 1: 0.5}
    fleet.answers = lambda agent: a_still_answer(0.5, step=6)
    live = await fleet.watch()
    assert (live.report.step, live.suspicion) == (5, None)


@pytest.mark.parametrize("still", [{0: 4.5, 1: 0.5}, {0: 4.5}], ids=["takes steps", "does not answer"])
async def test_nobody_is_named_where_a_pod_takes_steps_or_does_not_answer(still: dict[int, float]) -> None:
    """Another pod's machine was frozen, or is."""
    fleet = Still()
    fleet.still = still
    await fleet.round()
    assert (await fleet.named(), fleet.looks) == (None, [])


@pytest.mark.parametrize(
    ("still", "named_at"),
    [({0: 3.0, 1: 3.0}, 4.0), ({0: 3.3, 1: 3.0}, 4.0), ({0: 3.4, 1: 3.4}, 4.0), ({0: 3.9, 1: 3.9}, 4.4)],
    ids=["three steps", "another clock is ahead", "a little longer", "no time for a look before"],
)
async def test_a_rank_is_named_a_second_after_what_its_steps_take_where_the_round_comes_in_time(
    still: dict[int, float], named_at: float
) -> None:
    """Red where the first look at the stacks comes when the second is over, or a look waits for the next round."""
    fleet = Still()
    fleet.still = still
    live = await fleet.round()
    assert live.suspicion.blame.rank == 1
    assert live.suspicion.still_seconds == pytest.approx(named_at)
    assert fleet.still[1] == pytest.approx(named_at)


async def test_an_agent_that_was_stopped_between_the_looks_is_given_what_is_left_of_the_second() -> None:
    fleet = Still()
    fleet.still = {0: 3.2, 1: 3.2}

    def stopped() -> None:
        if fleet.still[1] == pytest.approx(4.0):
            fleet.still[1] = 3.7
            fleet.meanwhile = lambda: None

    fleet.meanwhile = stopped
    live = await fleet.round()
    assert (live.suspicion.blame.rank, live.suspicion.still_seconds) == (1, pytest.approx(4.0))
    assert fleet.passed == pytest.approx(0.3 + 0.5 + 0.3)


async def test_a_gang_whose_step_is_longer_than_others_is_not_asked_for_stacks_where_it_ends_meanwhile() -> None:
    """Red where stacks are asked for as soon as a step takes longer than others."""
    fleet = Still()
    fleet.still = {0: 3.2, 1: 3.2}
    fleet.meanwhile = lambda: fleet.still.update({1: 0.1})
    live = await fleet.round()
    assert (live.suspicion, fleet.looks, fleet.passed) == (None, [], pytest.approx(0.3))


@pytest.mark.parametrize("look", [1, 2])
async def test_nobody_is_named_where_a_step_ends_between_the_looks(look: int) -> None:
    fleet = Still()

    def ends(agent: Agent) -> bytes:
        if len(fleet.looks) == 2 * look - 1:
            fleet.still = {0: 0.0, 1: 0.0}
        return fleet.look(agent)

    fleet.stacks = ends
    live = await fleet.round()
    assert (live.suspicion, len(fleet.looks)) == (None, 4)


async def test_a_gang_that_is_slow_to_tell_its_stacks_holds_up_no_other_round() -> None:
    """Red where a round waits for the answers of the former one, or asks an agent that has not answered yet."""
    fleet, may_answer = Still(), asyncio.Event()

    async def ask(agent: Agent, token: str, path: str) -> bytes:
        if path == STACKS_PATH:
            await may_answer.wait()
        return await fleet._ask(agent, token, path)

    async with asyncio.TaskGroup() as tasks:
        await fleet.agents.round(ask, tasks)
        await eventually(lambda: len(fleet.asked) == 3)
        for _ in range(3):
            await fleet.agents.round(ask, tasks)
            await fleet.agents.watch(ask, tasks)
        assert len(fleet.asked) == 3
        may_answer.set()
    live = fleet.agents.live(UID)
    assert live is not None
    assert live.suspicion is not None
    assert live.suspicion.blame.rank == 1
    asked = len(fleet.asked)
    await fleet.watch()
    assert len(fleet.asked) == asked + 1


async def test_nobody_is_named_where_a_pod_of_the_gang_has_no_agent() -> None:
    fleet = Still()
    waiting = a_pod(1, 1, phase="Pending")
    waiting["metadata"]["resourceVersion"] = "6"
    fleet.world.pods.observe(waiting)
    live = await fleet.round()
    assert (live.suspicion, fleet.looks) == (None, [])


async def test_ranks_whose_stacks_tell_nobody_are_soon_looked_at_in_rounds_for_figures_alone() -> None:
    fleet = Still()
    fleet.blamed = json.loads(STACKS)["stacks"]["0"].replace("/a/", "/torch/distributed/")
    await fleet.round()
    for _ in range(5):
        assert await fleet.named() is None
    assert len(fleet.looks) == 2 * 3, "three looks at two pods"
    await fleet.round()
    assert len(fleet.looks) == 2 * 4
    fleet.still = {0: 0.5, 1: 0.5}
    await fleet.named()
    fleet.still, fleet.blamed = {0: 4.5, 1: 4.5}, STOPPED
    assert await fleet.named() == 1, "steps have ended since: it is another standstill"


async def test_an_agent_that_does_not_answer_between_rounds_is_not_asked_there_again() -> None:
    fleet = Still()
    fleet.still = {0: 0.5, 1: 0.5}
    await fleet.round()
    fleet.answers = refuses
    for _ in range(3):
        await fleet.watch()
    assert [agent.index for agent, _ in fleet.asked] == [0, 0, 1]
    fleet.answers = lambda agent: a_still_answer(0.5)
    await fleet.round()
    await fleet.watch()
    assert [agent.index for agent, _ in fleet.asked] == [0, 0, 1, 0, 0]


async def test_a_job_whose_ranks_take_no_steps_is_asked_in_rounds_for_figures_alone() -> None:
    fleet = Still()
    fleet.still = {0: 0.5, 1: 0.5}
    await fleet.round()
    fleet.answers = lambda agent: an_answer(phase="Evaluating")
    await fleet.round()
    await fleet.watch()
    assert len(fleet.asked) == 2
