"""How long until a pod on a dead node, or a stopped one, is known to be lost, and has a replacement: the operator asks
at its own pace, in a time of its own."""

import asyncio
import json
from copy import deepcopy
from datetime import timedelta

import pytest

from disttrain_api.status import JobStatus
from disttrain_operator.agent_client import ANSWER_SECONDS as TOTAL_SECONDS
from disttrain_operator.agent_client import CONNECT_SECONDS, STACKS_PATH, Agent
from disttrain_operator.agent_http import Unreachable
from disttrain_operator.agents import Agents
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import CreatePod, DeletePod
from disttrain_operator.decide.gang_actions import SURVIVOR_GRACE_SECONDS
from disttrain_operator.decide.missed import missed
from disttrain_operator.silent_pods import SilentPods
from disttrain_operator.snapshot import Sources
from tests.builders import NOW, a_raw_job
from tests.unit.operator.agent_fleet import Fleet, a_pod
from tests.unit.operator.clocked_loop import JumpingLoop
from tests.unit.operator.test_suspicion import a_still_answer

ANSWER_SECONDS, STACKS_SECONDS, STEP_SECONDS = 0.005, 0.11, 0.2
WAITS = 'Current thread 0x1 (most recent call first):\n  File "/torch/distributed/c10d.py", line 3 in all_reduce\n'


class Dying:
    """A job of two pods with a rank each, whose steps take a fifth of a second; then the node of one has no power, or
    a signal stops the processes of the pod."""

    def __init__(self, victim: int, *, stopped: bool = False, strategy: str = "InPlace") -> None:
        self.loop, self.victim, self.died, self.stopped = JumpingLoop(), victim, float("inf"), stopped
        policy = {"restartStrategy": strategy}
        self.raw_job = a_raw_job(runPolicy=policy)
        self.raw_job["metadata"]["resourceVersion"] = "4"
        self.world, self.done = Fleet(a_pod(), a_pod(1, 1), runPolicy=policy).world, asyncio.Event()
        active = lambda: True  # noqa: E731 - it acts all the time
        self.agents = Agents(self.world, str, self.look, active, interval=10, per_second=100, ask=self.ask)
        self.silent = SilentPods(
            self.world, str, self.agents.live, self.look, active, clock=lambda: self.loop.now, ask=self.ask
        )

    def look(self, uid: str) -> None:
        """What the operator does when it is woken, as far as it matters here: it knows that the pod is lost."""
        snapshot = self.world.snapshot(uid)
        assert snapshot is not None
        lost = self.silent.silent(uid) if self.stopped else self.silent.unreachable(uid)
        pods = missed(snapshot[1].pods, self.agents.live(uid))
        if any(pod.uid in lost and pod.index == self.victim for pod in pods):
            self.done.set()

    async def ask(self, agent: Agent, token: str, path: str) -> bytes:
        still = self.loop.now - self.died
        if agent.index == self.victim and still >= 0 and self.stopped:
            await asyncio.sleep(TOTAL_SECONDS)
            raise TimeoutError
        if agent.index == self.victim and still >= 0:
            await asyncio.sleep(CONNECT_SECONDS)
            raise Unreachable
        await asyncio.sleep(STACKS_SECONDS if path == STACKS_PATH else ANSWER_SECONDS)
        if path == STACKS_PATH:
            return json.dumps({"stacks": {str(agent.index): WAITS}}).encode()
        answer = json.loads(a_still_answer(max(still, 0.1), agent.index))
        answer["ranks"][0]["pace"] |= {"medianSeconds": STEP_SECONDS, "longestSeconds": STEP_SECONDS}
        return json.dumps(answer).encode()

    def seconds_until_done(self, rounds: float) -> float:
        """Return how long after its death what is looked for has come. rounds: seconds between the operator's first
        round and the death."""
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            return runner.run(self._seconds_until_done(rounds))

    async def _seconds_until_done(self, rounds: float) -> float:
        tasks = [self.loop.create_task(self.agents.run()), self.loop.create_task(self.silent.run())]
        await asyncio.sleep(rounds)
        assert not self.done.is_set()
        self.died = self.loop.now
        await asyncio.wait_for(self.done.wait(), 200)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.loop.now - self.died


class Replaced(Dying):
    """The same, where the operator decides, and the API server obeys at once. On the dead node nobody ends what is
    asked to end; the kubelet of the other one takes as long as it may."""

    def look(self, uid: str) -> None:
        sources = Sources(live_of=self.agents.live, unreachable_of=self.silent.unreachable)
        for _ in range(9):
            seen = self.world.snapshot(uid, sources)
            assert seen is not None
            decision = decide(*seen, NOW + timedelta(seconds=self.loop.now))
            if decision.status is not None:
                self.write(decision.status)
            for action in decision.actions:
                if isinstance(action, DeletePod) and action.grace_seconds == 0:
                    self.remove(action.uid)
                elif isinstance(action, DeletePod) and action.name.rpartition("-a")[0][-1] != str(self.victim):
                    self.loop.call_later(action.grace_seconds or 0, self.ended, uid, action.uid)
                elif isinstance(action, CreatePod) and action.index == self.victim:
                    self.done.set()

    def remove(self, pod_uid: str) -> None:
        if (pod := self.world.pods.get(pod_uid)) is not None:
            self.world.pods.observe_deleted(pod)

    def ended(self, uid: str, pod_uid: str) -> None:
        self.remove(pod_uid)
        self.look(uid)

    def write(self, status: JobStatus) -> None:
        self.raw_job["metadata"]["resourceVersion"] = str(int(self.raw_job["metadata"]["resourceVersion"]) + 1)
        self.raw_job["status"] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.world.jobs.observe(deepcopy(self.raw_job))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", ["InPlace", "Recreate"])
def test_a_pod_on_a_dead_node_has_a_successor_as_soon_as_it_is_known(victim: int, strategy: str) -> None:
    """Red where the replacement, or the next gang, waits for a pod that nobody ends. A gang also waits until the others
    have ended."""
    taken = [Replaced(victim, strategy=strategy).seconds_until_done(moment) for moment in (1.0, 1.6, 5.0, 9.8)]
    others = SURVIVOR_GRACE_SECONDS if strategy == "Recreate" else 0
    assert min(taken) > 6.0 + others
    assert max(taken) <= 15.0 + others, taken


@pytest.mark.parametrize("victim", [0, 1])
def test_a_pod_on_a_dead_node_is_known_within_15_seconds_whenever_it_dies(victim: int) -> None:
    taken = [Dying(victim).seconds_until_done(1.0 + moment) for moment in (0.0, 0.3, 0.6, 0.9, 4.0, 8.0, 8.9)]
    assert min(taken) > 6.0
    assert max(taken) <= 15.0, taken


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_pod_is_known_within_a_minute_where_another_one_of_its_node_answers(victim: int) -> None:
    moments = (0.0, 0.3, 0.6, 0.9, 4.0, 8.0, 8.9)
    taken = [Dying(victim, stopped=True).seconds_until_done(1.0 + moment) for moment in moments]
    assert min(taken) > 30.0
    assert max(taken) <= 50.0, taken
