"""How long until a rank that hangs is named: the agents look and the operator asks, in a time of their own."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.local_agents import world_of
from disttrain_agent.step_clock import StepClock
from disttrain_api.stacks import STOPPED
from disttrain_operator.agent_client import STACKS_PATH, Agent
from disttrain_operator.agents import Agents
from disttrain_operator.gang_stacks import MOST_PODS
from disttrain_trainer.runtime.step_times import StepTimes
from tests.builders import a_raw_job
from tests.unit.operator.agent_fleet import STACKS, an_answer
from tests.unit.operator.clocked_loop import JumpingLoop

ANSWER_SECONDS, STACKS_SECONDS = 0.005, 0.11
"""An agent looks twice, 50 ms apart, whether a rank still writes its stacks."""
WAITS = json.loads(STACKS)["stacks"]["0"].replace("/a/", "/torch/distributed/")
STEPS_BEFORE = 27
"""The operator then asks just after an agent has looked, which is the worst moment where agents look seldom."""


class Hanging:
    """A job of pods with a rank each, of which the last one is stopped; the operator asks at its own pace. The others
    are all as the first one."""

    def __init__(self, folder: Path, step_seconds: float, pods: int = 2) -> None:
        self.step_seconds, self.loop, self.victim = step_seconds, JumpingLoop(), pods - 1
        self.times = [StepTimes(rank, folder, lambda: self.loop.now) for rank in (0, 1)]
        self.clocks = [StepClock(folder, [rank], lambda: self.loop.now) for rank in (0, 1)]
        self.named = asyncio.Event()
        job = a_raw_job(workers={"replicas": pods})
        job["metadata"]["resourceVersion"] = "2"
        self.agents = Agents(
            world_of([job], pods),
            *(str, self.news, lambda: True), interval=10, per_second=100, ask=self.ask,
        )  # fmt: skip

    def news(self, uid: str) -> None:
        live = self.agents.live(uid)
        if live is not None and live.suspicion is not None and live.suspicion.blame.rank == self.victim:
            self.named.set()

    async def ask(self, agent: Agent, token: str, path: str) -> bytes:
        rank, like = agent.index, int(agent.index == self.victim)
        if path == STACKS_PATH:
            await asyncio.sleep(STACKS_SECONDS)
            return json.dumps({"stacks": {str(rank): STOPPED if like else WAITS}}).encode()
        await asyncio.sleep(ANSWER_SECONDS)
        answer, pace = json.loads(an_answer(phase="Training")), self.clocks[like].pace(like)
        answer["ranks"][0] |= {"rank": rank, "pace": pace and pace.model_dump(by_alias=True)}
        return json.dumps(answer).encode()

    async def train(self, seconds: float) -> None:
        end = self.loop.now + seconds
        while self.loop.now + self.step_seconds <= end:
            await asyncio.sleep(self.step_seconds)
            for times in self.times:
                times.stepped()
        await asyncio.sleep(end - self.loop.now)

    def seconds_until_named(self, rounds: float) -> float:
        """Return how long after its hang the rank is named. rounds: seconds between the operator's first round and the
        hang."""
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            return runner.run(self._seconds_until_named(rounds))

    async def _seconds_until_named(self, rounds: float) -> float:
        tasks = [self.loop.create_task(clock.watch()) for clock in self.clocks]
        with self.times[0].counted(), self.times[1].counted():
            await self.train(STEPS_BEFORE * self.step_seconds)
            tasks.append(self.loop.create_task(self.agents.run()))
            await self.train(rounds)
            assert not self.named.is_set()
            began = self.loop.now
            await self.named.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.loop.now - began


@pytest.mark.parametrize("step_seconds", [0.02, 0.3])
def test_a_rank_that_hangs_is_named_within_three_steps_and_two_seconds_whenever_it_begins(
    tmp_path: Path, step_seconds: float
) -> None:
    """Red with two looks a second by the agent, or a look at the stacks that waits for all of the second to be over."""
    taken = [Hanging(tmp_path, step_seconds).seconds_until_named(1.0 + 0.1 * moment) for moment in range(11)]
    assert min(taken) > 1.0
    assert max(taken) <= 3 * step_seconds + 2.0


@pytest.mark.parametrize("pods", [64, MOST_PODS])
def test_the_size_of_the_gang_does_not_delay_it(tmp_path: Path, pods: int) -> None:
    """Red where the agents of a gang wait for each other."""
    taken = [Hanging(tmp_path, 0.3, pods).seconds_until_named(1.0 + moment) for moment in (0.0, 0.5)]
    assert max(taken) <= 3 * 0.3 + 2.0
