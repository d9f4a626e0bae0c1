"""A job with pods whose agents answer what a test sets."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from disttrain_api.names import AGENT_PORT, CHECKPOINT_PATH, CONTAINER, Env, Role
from disttrain_operator.agent_client import STACKS_PATH, Agent, Ask
from disttrain_operator.agents import Agents
from disttrain_operator.decide.live import Live
from disttrain_operator.snapshot import World
from tests.builders import UID, a_job, a_raw_job, a_raw_pod, running

Raw = dict[str, Any]


def a_pod(attempt: int = 1, index: int = 0, host: str = "10.0.0.7", port: object = AGENT_PORT, **status: Any) -> Raw:
    """A pod that runs, with an agent."""
    pod = running(a_raw_pod(a_job(), Role.WORKER, index, attempt))
    env = [{"name": Env.AGENT_PORT, "value": str(port)}]
    pod["spec"] |= {"containers": [{"name": CONTAINER, "env": env}]}
    pod["metadata"]["resourceVersion"] = "5"
    pod["status"] |= {"podIP": host} | status
    return pod


def an_answer(attempt: int = 1, uid: str = UID, **report: Any) -> bytes:
    rank = {"rank": 0, "step": 5, "totalSteps": 9, **report}
    return json.dumps({"jobUid": uid, "attempt": attempt, "ranks": [{"rank": 0, "report": rank}]}).encode()


STACKS = json.dumps(
    {"stacks": {"0": 'Current thread 0x1 (most recent call first):\n  File "/a/b.py", line 3 in all_reduce\n'}}
).encode()


def a_silent_answer(seconds: float, phase: str | None = "Training") -> bytes:
    answer = json.loads(an_answer(phase=phase))
    answer["ranks"][0]["secondsSinceStep"] = seconds
    return json.dumps(answer).encode()


class Fleet:
    """A job with pods, and agents whose answers the test sets."""

    def __init__(self, *pods: Raw, **spec: Any) -> None:
        self.world = World()
        for cache in (self.world.jobs, self.world.pods):
            cache.replace([], 1)
        self.world.jobs.observe(a_raw_job(**spec) | {"metadata": a_raw_job()["metadata"] | {"resourceVersion": "4"}})
        for pod in pods:
            self.world.pods.observe(pod)
        self.asked: list[tuple[Agent, str]] = []
        self.woken: list[str] = []
        self.answers: Callable[[Agent], bytes] = lambda agent: an_answer()
        self.stacks: Callable[[Agent], bytes] = lambda agent: STACKS
        self.checkpoints: Callable[[Agent], bytes] = lambda agent: b"{}"
        self.agents = Agents(
            self.world, lambda uid: f"token of {uid}", self.woken.append, lambda: True, interval=10, per_second=1e6,
            sleep=self.sleep,
        )  # fmt: skip

    async def sleep(self, seconds: float) -> None:
        """Seconds pass while a gang is looked at."""

    async def round(self, ask: Ask | None = None) -> Live | None:
        """Have the agents asked for figures; returns what is known when all have answered."""
        async with asyncio.TaskGroup() as tasks:
            await self.agents.round(ask or self._ask, tasks)
        return self.agents.live(UID)

    async def _ask(self, agent: Agent, token: str, path: str) -> bytes:
        if path == STACKS_PATH:
            return self.stacks(agent)
        if path == CHECKPOINT_PATH:
            return self.checkpoints(agent)
        self.asked.append((agent, token))
        return self.answers(agent)


def refuses(agent: Agent) -> bytes:
    raise TimeoutError
