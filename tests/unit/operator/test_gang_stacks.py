"""How many agents are asked, and how much of their answers is kept, when many gangs stand still at the same time."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest

from benchmarks.local_agents import world_of
from disttrain_api.stacks import MAX_STACK_BYTES, MAX_STACKS_ANSWER_BYTES, STOPPED
from disttrain_operator.agent_client import STACKS_PATH, Agent
from disttrain_operator.decide import stacks as decide_stacks
from disttrain_operator.gang_stacks import AT_A_TIME, GANGS_AT_A_TIME, MOST_PODS, GangStacks
from tests.builders import a_raw_job

PACE = {"stillSeconds": 9.0, "medianSeconds": 1.0, "longestSeconds": 1.0}
RANK = {"pace": PACE, "report": {"rank": 0, "step": 5, "totalSteps": 9, "phase": "Training"}}
OF_OTHER_THREAD = 'Thread 0x2 (most recent call first):\n  File "/pool.py", line 1 in run\n\n'
WAITS = 'Current thread 0x1 (most recent call first):\n  File "/torch/distributed/c10d.py", line 3 in all_reduce\n'


class Gangs:
    """Jobs of so many pods with a rank each, which all stand still: in each job the last rank is stopped."""

    def __init__(self, jobs: int, pods: int) -> None:
        self.pods, self.uids = pods, [f"uid-{number}" for number in range(jobs)]
        raws = [a_raw_job(uid, workers={"replicas": pods}) for uid in self.uids]
        for raw, uid in zip(raws, self.uids, strict=True):
            raw["metadata"] |= {"uid": uid, "resourceVersion": "2"}
        self.stacks = GangStacks(world_of(raws, pods), str, self.sleep)
        self.asked = self.most_asked = self.most_gangs = 0
        self.telling: Counter[str] = Counter()
        self.most_bytes: set[int] = set()

    async def sleep(self, seconds: float) -> None:
        pass

    async def ask(self, agent: Agent, token: str, path: str) -> bytes:
        self.asked += 1
        self.most_asked = max(self.most_asked, self.asked)
        self.most_bytes.add(agent.most_bytes)
        tells = path == STACKS_PATH
        self.telling += Counter({agent.job_uid: tells})
        self.most_gangs = max(self.most_gangs, len(self.telling))
        for _ in range(3):
            await asyncio.sleep(0)
        self.asked -= 1
        self.telling -= Counter({agent.job_uid: tells})
        if tells:
            return json.dumps({"stacks": {str(agent.index): self.stack(agent)}}).encode()
        return json.dumps({"jobUid": agent.job_uid, "attempt": 1, "ranks": [RANK | {"rank": agent.index}]}).encode()

    def stack(self, agent: Agent) -> str:
        return STOPPED if agent.index == self.pods - 1 else OF_OTHER_THREAD + WAITS

    async def named(self) -> list[int | None]:
        found: list[Awaitable[Any]] = [self.stacks.suspicion(self.first(uid), self.ask) for uid in self.uids]
        return [one and one.blame.rank for one in await asyncio.gather(*found)]

    def first(self, uid: str) -> Agent:
        return Agent(uid, f"{uid}-0", 1, "10.0.0.1", 29700)


async def test_all_agents_of_a_gang_are_asked_at_once_and_no_more_of_many_gangs() -> None:
    """Red where a gang is asked in turns, and without either bound."""
    one = Gangs(1, MOST_PODS)
    assert await one.named() == [MOST_PODS - 1]
    assert one.most_asked == MOST_PODS
    many = Gangs(4, AT_A_TIME // 2)
    assert await many.named() == [AT_A_TIME // 2 - 1] * 4
    assert many.most_asked == AT_A_TIME
    assert many.most_bytes == {MAX_STACKS_ANSWER_BYTES}, "also of a status, which may have more by itself"


async def test_the_stacks_of_few_gangs_are_kept_at_a_time() -> None:
    many = Gangs(3 * GANGS_AT_A_TIME, 2)
    assert await many.named() == [1] * len(many.uids)
    assert many.most_gangs == GANGS_AT_A_TIME


async def test_of_a_larger_gang_the_first_pods_are_asked() -> None:
    larger = Gangs(1, MOST_PODS + 2)
    assert await larger.named() == [None], "the rank that is stopped is in none of them"
    assert larger.most_asked == MOST_PODS


async def test_of_each_rank_no_more_is_kept_than_of_its_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of earlier versions answer with all threads, and a hostile one with anything."""
    kept: list[dict[int, str]] = []
    monkeypatch.setattr("disttrain_operator.gang_stacks.blame_of", lambda stacks, **_: kept.append(stacks))
    gang = Gangs(1, 3)
    monkeypatch.setattr(gang, "stack", lambda agent: "x" * 10**5 if agent.index else OF_OTHER_THREAD + WAITS)
    await gang.named()
    assert kept == [{0: WAITS, 1: "x" * MAX_STACK_BYTES, 2: "x" * MAX_STACK_BYTES}]
    assert decide_stacks.main_stack(kept[0][0]) == "all_reduce (c10d.py:3)"
