"""How long until a pod on a dead node is known to be lost: the operator asks at its own pace, in a time of its own."""

import asyncio
import json

import pytest

from disttrain_operator.agent_client import CONNECT_SECONDS, STACKS_PATH, Agent
from disttrain_operator.agent_http import Unreachable
from disttrain_operator.agents import Agents
from disttrain_operator.decide.missed import missed
from disttrain_operator.silent_pods import SilentPods
from tests.unit.operator.agent_fleet import Fleet, a_pod
from tests.unit.operator.clocked_loop import JumpingLoop
from tests.unit.operator.test_suspicion import a_still_answer

ANSWER_SECONDS, STACKS_SECONDS, STEP_SECONDS = 0.005, 0.11, 0.2
WAITS = 'Current thread 0x1 (most recent call first):\n  File "/torch/distributed/c10d.py", line 3 in all_reduce\n'


class Dying:
    """A job of two pods with a rank each, whose steps take a fifth of a second; then the node of one has no power."""

    def __init__(self, victim: int) -> None:
        self.loop, self.victim, self.died = JumpingLoop(), victim, float("inf")
        self.world, self.lost = Fleet(a_pod(), a_pod(1, 1)).world, asyncio.Event()
        active = lambda: True  # noqa: E731 - it acts all the time
        self.agents = Agents(self.world, str, self.look, active, interval=10, per_second=100, ask=self.ask)
        self.silent = SilentPods(
            self.world, str, self.agents.live, self.look, active, clock=lambda: self.loop.now, ask=self.ask
        )

    def look(self, uid: str) -> None:
        """What the operator does when it is woken, as far as it matters here."""
        snapshot = self.world.snapshot(uid)
        assert snapshot is not None
        unreachable = self.silent.unreachable(uid)
        pods = missed(snapshot[1].pods, self.agents.live(uid))
        if any(pod.uid in unreachable and pod.index == self.victim for pod in pods):
            self.lost.set()

    async def ask(self, agent: Agent, token: str, path: str) -> bytes:
        still = self.loop.now - self.died
        if agent.index == self.victim and still >= 0:
            await asyncio.sleep(CONNECT_SECONDS)
            raise Unreachable
        await asyncio.sleep(STACKS_SECONDS if path == STACKS_PATH else ANSWER_SECONDS)
        if path == STACKS_PATH:
            return json.dumps({"stacks": {str(agent.index): WAITS}}).encode()
        answer = json.loads(a_still_answer(max(still, 0.1), agent.index))
        answer["ranks"][0]["pace"] |= {"medianSeconds": STEP_SECONDS, "longestSeconds": STEP_SECONDS}
        return json.dumps(answer).encode()

    def seconds_until_known(self, rounds: float) -> float:
        """Return how long after its death the pod is known to be lost. rounds: seconds between the operator's first
        round and the death."""
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            return runner.run(self._seconds_until_known(rounds))

    async def _seconds_until_known(self, rounds: float) -> float:
        tasks = [self.loop.create_task(self.agents.run()), self.loop.create_task(self.silent.run())]
        await asyncio.sleep(rounds)
        assert not self.lost.is_set()
        self.died = self.loop.now
        await self.lost.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.loop.now - self.died


@pytest.mark.parametrize("victim", [0, 1])
def test_a_pod_on_a_dead_node_is_known_within_15_seconds_whenever_it_dies(victim: int) -> None:
    taken = [Dying(victim).seconds_until_known(1.0 + moment) for moment in (0.0, 0.3, 0.6, 0.9, 4.0, 8.0, 8.9)]
    assert min(taken) > 6.0
    assert max(taken) <= 15.0, taken
