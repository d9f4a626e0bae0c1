"""Hours of gangs of up to 128 pods, in a time of their own, whose agents the operator asks for paces and stacks: nobody
is named without a cause, whatever a gang does besides steps, and the rank that hangs always is.

The clocks of the agents themselves are those of tests/unit/trainer/test_false_alarms.py.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable

import pytest

from disttrain_agent.step_clock import KEPT_STEPS, LEAST_STEPS
from disttrain_api.report import AgentStatus, Idle, RankPhase, RankReport, RankStatus, StepPace
from disttrain_api.stacks import STOPPED, Stacks
from disttrain_operator.agent_client import Agent
from disttrain_operator.agents import WATCH_SECONDS
from disttrain_operator.decide.hang import MIN_SECONDS
from disttrain_operator.decide.live import Live
from disttrain_operator.silent_pods import SilentPods
from tests.builders import UID
from tests.unit.operator.agent_fleet import Fleet, Raw, a_pod

PODS, SEEDS = [1, 2, 7, 32, 128], range(4)
HOUR, ROUND_SECONDS, DEADLINE, STEPS = 3600.0, 10.0, 240, 10**6
GRACE_SECONDS = 40.0
"""Until Kubernetes calls a node not ready that does not report."""
_STACK = 'Current thread 0x1 (most recent call first):\n  File "{}", line 3 in {}\n'
WAITS, WAITS_ELSEWHERE = (_STACK.format("/torch/distributed/c10d.py", name) for name in ("all_reduce", "barrier"))
COMPUTES, READS = _STACK.format("/a/model.py", "forward"), _STACK.format("/a/data.py", "read")


def a_pod_of_many(index: int) -> Raw:
    """A worker's pod of a job of any size."""
    pod = a_pod(1, 1)
    pod["metadata"] |= {"uid": f"uid-{index}", "name": f"pod-{index}"}
    pod["spec"]["nodeName"] = f"node-{index}"
    pod["metadata"]["labels"]["disttrain.io/index"] = str(index)
    return pod


class Gang(Fleet):
    """A job of so many pods with a rank each, which take steps together."""

    def __init__(self, pods: int, chance: random.Random) -> None:
        workers = {"replicas": pods, "processesPerPod": 1}
        super().__init__(
            *(a_pod_of_many(index) for index in range(pods)),
            workers=workers,
            runPolicy={"progressDeadlineSeconds": DEADLINE},
        )
        self.chance, self.pods, self.now, self.step = chance, pods, 0.0, 0
        self.signs, self.between_signs = random.Random(pods), 1.0
        """What ranks do besides steps shows that they get on once in so many seconds, from the last pod on."""
        self.seconds = chance.choice([chance.uniform(0.2, 2.0), chance.uniform(2.0, 20.0)])
        self.phase, self.logged = RankPhase.STARTING, False
        self.times: deque[float] = deque(maxlen=KEPT_STEPS)
        self.changed = 0.0
        """When all ranks last began or ended a step."""
        self.frozen: set[int] = set()
        """Pods whose processes do not run, as those of their whole nodes."""
        self.stood = [0.0] * pods
        """Seconds since `changed` in which a pod was frozen."""
        self.deaf: set[int] = set()
        """Pods that the operator does not reach."""
        self.busy: dict[int, str] = {}
        """Stacks of ranks that do something else than to wait, while others wait for them."""
        self.hangs: int | None = None
        self.not_ready: set[int] = set()
        """Pods of nodes that Kubernetes calls not ready."""
        self.settled = 0.0
        """When the last of them has been ready for so long that a hang may be one."""
        self.plan: deque[tuple[float, Callable[[], None]]] = deque()
        self.ends = 0.0
        self.stops = False
        """Whether nodes are stopped in the next step."""
        self.then: Callable[[], None] = self.start
        self.alarms: list[tuple[float, object]] = []
        self.answers, self.stacks = self.status, self.where
        self.silent_pods = SilentPods(
            self.world, str, self.agents.live, lambda uid: None, lambda: True, clock=lambda: self.now
        )
        self.world.snapshot(UID)

    def start(self) -> None:
        """A life of the ranks begins: a checkpoint or the parameters of another job are loaded, then the first step is
        compiled."""
        self.moves(RankPhase.STARTING)
        self.logged = False
        self.times.clear()
        self.plan += [(self.chance.uniform(0, 1200), self.compile_first)]

    def compile_first(self) -> None:
        self.moves(RankPhase.TRAINING)
        self.busy = dict.fromkeys(range(self.pods), COMPUTES)
        self.plan += [(self.chance.uniform(0, 900), lambda: self.stepped(counted=False))]

    def stepped(self, *, counted: bool = True) -> None:
        """All ranks have ended a step."""
        if counted:
            self.times.append(self.now - self.changed)
            self.logged = True
        self.step += 1
        self.moves(RankPhase.TRAINING)

    def moves(self, phase: RankPhase) -> None:
        """All ranks begin a step, or something else."""
        self.phase, self.changed, self.stood = phase, self.now, [0.0] * self.pods
        self.busy, self.deaf = {}, set()
        self.frozen.clear()
        self.between_signs = self.signs.uniform(1.0, self.signs.choice([10.0, 290.0]))

    def rests(self, phase: RankPhase, seconds: float) -> None:
        """Do something else than steps."""
        self.moves(phase)
        self.plan += [(seconds, lambda: self.moves(RankPhase.TRAINING))]

    def go_on(self) -> None:
        """Plan what comes next."""
        chance = self.chance
        usual, event = self.seconds * chance.uniform(0.8, 1.1), 100 * chance.random()
        # At worst the stacks of a usual step are those of a hang: one rank waits elsewhere than all others.
        self.busy = {self.pods - 1: WAITS_ELSEWHERE}
        if self.stops:
            self.is_stopped(usual)
            return
        if event < 0.2:
            self.busy = dict.fromkeys(range(self.pods), COMPUTES)
            usual += chance.uniform(0, 60)
        elif event < 1.0:
            self.busy = {chance.randrange(self.pods): READS}
            usual += chance.uniform(0, 60)
        elif event < 1.1:
            self.is_stopped(usual)
            return
        elif event < 1.3:
            self.deaf = {chance.randrange(self.pods)}
        elif event < 1.33:
            self.rests(RankPhase.EVALUATING, chance.choice([chance.uniform(0, 60), chance.uniform(0, 1800)]))
            return
        elif event < 1.38:
            self.rests(RankPhase.SAVING, chance.uniform(0, 600))
            return
        elif event < 1.39:
            self.start()
            return
        self.plan += [(usual, self.stepped)]

    def is_stopped(self, usual: float) -> None:
        """One pod, some, or all stand still in a step, and go on."""
        some = self.chance.sample(range(self.pods), self.chance.randint(1, self.pods))
        stopped = self.chance.choice([{self.chance.randrange(self.pods)}, set(some), set(range(self.pods))])
        # Where the first pod goes on to be asked, the others' standstill is a hang once the deadline is over.
        most = self.chance.choice([40.0, 1500.0 if 0 in stopped else DEADLINE - 40.0])
        before = self.chance.random() * usual
        self.plan += [
            (before, lambda: self.frozen.update(stopped)),
            (self.chance.uniform(0, most), self.frozen.clear),
            (usual - before, self.stepped),
        ]

    async def sleep(self, seconds: float) -> None:
        """Time passes, also while the operator looks at the gang."""
        end = self.now + seconds
        while self.hangs is None and self.ends <= end:
            self._pass(self.ends)
            self.then()
            if not self.plan:
                self.go_on()
            seconds, self.then = self.plan.popleft()
            self.ends = self.now + seconds
        self._pass(end)

    def _pass(self, now: float) -> None:
        for pod in self.frozen:
            self.stood[pod] += now - self.now
        self.now = now

    def kubernetes_notices(self) -> None:
        """Nodes that stand still are not ready after a while, and ready as soon as they go on."""
        found = {pod for pod in self.frozen if self.stood[pod] >= GRACE_SECONDS}
        if found == self.not_ready:
            return
        for index in found ^ self.not_ready:
            pod = a_pod_of_many(index)
            pod["metadata"]["resourceVersion"] = f"{self.now:.0f}0"
            pod["status"]["conditions"] = [{"type": "Ready", "status": str(index not in found)}]
            self.world.pods.observe(pod)
        self.not_ready, self.settled = found, self.now + MIN_SECONDS
        self.world.snapshot(UID)

    def status(self, agent: Agent) -> bytes:
        if agent.index in self.frozen or agent.index in self.deaf:
            raise TimeoutError
        still = self.now - self.changed - self.stood[agent.index]
        trains = self.phase is RankPhase.TRAINING and len(self.times) >= LEAST_STEPS
        report = RankReport(
            rank=agent.index, phase=self.phase, step=self.step, total_steps=STEPS,
            loss=1.0 if self.logged else None, remaining_seconds=(STEPS - self.step) * self.seconds,
        )  # fmt: skip
        pace = StepPace(
            still_seconds=still, median_seconds=sorted(self.times)[len(self.times) // 2],
            longest_seconds=max(self.times),
        ) if trains else None  # fmt: skip
        # The others wait for the last pod, and show nothing themselves.
        pause = still % self.between_signs if agent.index == self.pods - 1 else still
        rank = RankStatus(
            rank=agent.index, report=report, pace=pace, seconds_since_step=still if self.logged else None,
            idle=Idle(phase=self.phase, seconds=pause, longest_seconds=1.0),
        )  # fmt: skip
        answer = AgentStatus(job_uid=UID, attempt=1, ranks=[rank])
        return answer.model_dump_json(by_alias=True, exclude_none=True).encode()

    def where(self, agent: Agent) -> bytes:
        if agent.index in self.frozen or agent.index in self.deaf:
            raise TimeoutError
        text = STOPPED if agent.index == self.hangs else self.busy.get(agent.index, WAITS)
        return Stacks(stacks={str(agent.index): text}).model_dump_json().encode()

    async def watch(self) -> Live | None:
        """Have the agents asked between two rounds for figures."""
        async with asyncio.TaskGroup() as tasks:
            await self.agents.watch(self._ask, tasks)
        return self.agents.live(UID)

    async def passes(self, seconds: float) -> None:
        """Let time pass in which the operator asks at its own pace."""
        end, due = self.now + seconds, self.now
        while self.now < end:
            if self.now >= due:
                due = self.now + ROUND_SECONDS
                live = await self.round()
            else:
                live = await self.watch()
            if live is not None and (live.suspicion or live.missing):
                self.alarms.append((self.now, live))
            if live is not None and live.stall and not self.not_ready and self.now >= self.settled:
                self.alarms.append((self.now, live.stall))
            await self.silent_pods.round(self._ask)
            if lost := self.silent_pods.silent(UID) | self.silent_pods.unreachable(UID):
                self.alarms.append((self.now, lost))
            self.kubernetes_notices()
            await self.sleep(WATCH_SECONDS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pods", PODS)
async def test_an_hour_of_a_gang_has_no_alarm(pods: int, seed: int) -> None:
    """Red without: the second look, the comparison of all pods' clocks, the time of one that computes or reads."""
    gang = Gang(pods, random.Random(seed))
    while gang.step == 0:
        await gang.passes(ROUND_SECONDS)
    await gang.passes(HOUR)
    assert gang.alarms == []


@pytest.mark.parametrize("pods", [2, 7])
async def test_nodes_that_are_stopped_and_go_on_raise_no_alarm(pods: int) -> None:
    """Red where a pod is silent before its node could be called not ready, or though it is; and where it is named."""
    for seed in range(12):
        gang = Gang(pods, random.Random(seed))
        while len(gang.times) < LEAST_STEPS:
            await gang.passes(ROUND_SECONDS)
        # From now on this is the longest step by far, which hides the next ones.
        gang.stops = True
        while not gang.frozen:
            await gang.passes(WATCH_SECONDS)
        gang.stops = False
        await gang.passes(1600.0)
        assert gang.alarms == [], seed


@pytest.mark.parametrize("pods", PODS[1:])
async def test_after_an_hour_the_rank_that_hangs_is_named_and_no_other(pods: int) -> None:
    gang = Gang(pods, random.Random(pods))
    await gang.passes(HOUR)
    while gang.phase is not RankPhase.TRAINING or len(gang.times) < LEAST_STEPS or gang.frozen or gang.deaf:
        await gang.passes(WATCH_SECONDS)
    assert gang.alarms == []
    gang.hangs = gang.chance.randrange(1, pods)
    await gang.passes(3 * max(gang.times) + 10)
    live = gang.agents.live(UID)
    assert live is not None
    assert live.suspicion is not None
    assert (live.suspicion.blame.rank, live.suspicion.blame.certain) == (gang.hangs, True)
