"""A job's pods, agents and operators in memory, around the code that decides in each of them.

Real are both parts of a gang (Leader, Member), what an agent answers (Look), the operators' caches, `decide`, their
orders (HangOrders), and the choice of the state that ranks go on from (choose). Ranks and kubelets are a few lines
here. A connection loses what it has not delivered; a request may come late, twice or never.
"""

from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

from disttrain_agent.environment import PodEnvironment
from disttrain_agent.gang.leader import Leader
from disttrain_agent.gang.member import Member
from disttrain_agent.gang.messages import Message, PodFailure
from disttrain_agent.look import Look
from disttrain_agent.restart import Kept, Limits
from disttrain_api.names import ExitCode
from disttrain_api.report import (
    CheckpointReport,
    PodReport,
    RankFailure,
    RankPhase,
    RankReport,
    RestartsInPlace,
)
from disttrain_api.times import timestamp
from disttrain_trainer.survivors.choose import Choice, Offer, choose
from tests.builders import NOW, UID, awaiting_address, ended, running
from tests.unit.decide.cluster import Server, member

from .test_gang_decisions import LONGEST, PATIENCE, WINDOW

WORKERS = 3
_STEPS = 10_000


@dataclass(eq=False, repr=False)
class Link:
    """A connection between two agents, which keeps the order of what is sent. An end that is closed hears nothing."""

    member: "Pod"
    leader: "Pod"
    up: deque[Message] = field(default_factory=deque)
    down: deque[Message] = field(default_factory=deque)

    def __repr__(self) -> str:
        return f"from {self.member} to {self.leader}"


@dataclass(eq=False, repr=False)
class Pod:
    """A pod's processes: they may live on when the API server has no such pod any more."""

    uid: str
    name: str
    index: int
    attempt: int
    replacement: int
    agent: Leader | Member
    rank: int | None = None
    """The generation of its rank; None: none runs."""
    started: int = -1
    step: int | None = None
    """The last step in its rank's state; None: it has none yet."""
    left_state: int | None = None
    """The same of a rank that has ended, in the memory of the pod."""
    meets: str = ""
    """Where its rank looks for rank 0: the uid of a pod."""
    stopped: bool = False
    """Its agent handles nothing: somebody has stopped it."""
    apart: bool = False
    """Nothing gets through between it and others."""
    still_seconds: float = 0.0
    report: RankReport | None = None
    restarts: RestartsInPlace | None = None
    began: int | None = None  # the step after which its rank has gone on
    failed_at: str = ""
    end: PodFailure | None = None
    """How its rank has ended, which its agent has yet to see."""
    words: RankFailure | None = None
    """The same, as the agent reports it if the pod ends."""
    link: Link | None = None
    """To worker 0's agent."""
    links: dict[int, Link] = field(default_factory=dict)
    """With the others' agents."""
    alive: bool = True

    def __repr__(self) -> str:
        return f"{self.uid} (worker {self.index})"

    def status(self) -> bytes:
        """The agent's answer to GET /v1/status."""
        return self._look(0.0).status({}).model_dump_json(by_alias=True, exclude_none=True).encode()

    def restart(self, path: str, now: float) -> bool | str:
        """The agent's answer to POST /v1/restart."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(path).query).items()}
        rank = int(asked["rank"]) if "rank" in asked else None
        return self._look(now).restart(int(asked["attempt"]), int(asked["generation"]), int(asked["step"]), rank)

    def _look(self, now: float) -> Look:
        pod = PodEnvironment(
            self.index, 1, "10.0.0.1", None, Path(), 30.0, {}, job_uid=UID, attempt=self.attempt, workers=WORKERS
        )
        process = SimpleNamespace(rank=self.index, pid=1, returncode=1 if self.rank is None else None)
        processes: Any = SimpleNamespace(ranks=[process])
        reports: Any = SimpleNamespace(of=lambda rank: self.report, seconds_since_step=lambda rank: self.still_seconds)
        agent, restarts = self.agent, self.restarts

        def hangs(generation: int, rank: int | None) -> bool | str:
            if not isinstance(agent, Leader):
                return "worker 0's agent leads"
            saved = None if self.report is None else self.report.checkpoint
            return agent.hangs(generation, rank, Kept(saved and saved.step, self.began), now)

        def awaited() -> frozenset[int]:
            return agent.awaited if isinstance(agent, Leader) else frozenset({0} if agent.is_alone else ())

        return Look(
            pod, processes, reports, lambda: restarts, awaited, generation=lambda: agent.generation, hangs=hangs
        )


class Gang:
    """The pods of a job, whose kubelets, agents and ranks do what is theirs to do."""

    def __init__(self, server: Server, limits: Limits) -> None:
        self.server, self._limits = server, limits
        self.pods: list[Pod] = []
        self.links: list[Link] = []
        self.effects: list[tuple[int, int, str]] = []
        """For each step in the job's state which attempt, generation and pod of rank 0 did it."""
        self.furthest = 0
        self.checkpoint = 0
        self.decided: dict[int, int] = {}
        """By attempt, the last restart in place that was decided on."""

    @property
    def now(self) -> float:
        return (self.server.now - NOW).total_seconds()

    def of(self, index: int) -> list[Pod]:
        """The pods of a worker that live, the newest first."""
        return [pod for pod in reversed(self.pods) if pod.index == index and pod.alive]

    def current(self, index: int) -> Pod | None:
        """The pod of a worker that the API server knows, if it lives."""
        return next((pod for pod in self.of(index) if self.is_known(pod)), None)

    def is_known(self, pod: Pod) -> bool:
        """Whether the API server has this pod, and not another one of its name or none."""
        raw = self.server.pods.get(pod.name)
        return raw is not None and raw["metadata"]["uid"] == pod.uid

    def _raw(self, pod: Pod) -> dict[str, Any] | None:
        return deepcopy(self.server.pods[pod.name]) if self.is_known(pod) else None

    # Kubelets

    def kubelets_look(self) -> None:
        """They start pods, and end those that are to go."""
        for raw in list(self.server.pods.values()):
            uid, (_, index, attempt) = raw["metadata"]["uid"], member(raw)
            known = next((pod for pod in self.pods if pod.uid == uid), None)
            if known is None and "deletionTimestamp" in raw["metadata"]:
                self.server.remove_pod(raw["metadata"]["name"])
            elif known is None:
                self._start_pod(deepcopy(raw), uid, index, attempt)
            elif "deletionTimestamp" in raw["metadata"] and not known.apart:
                if known.alive and not known.stopped:
                    known.agent.depart("SIGTERM to the pod")
                    self._send(known)
                self.end_pod(known)
                self.server.remove_pod(known.name)
        self.settle()

    def _start_pod(self, raw: dict[str, Any], uid: str, index: int, attempt: int) -> None:
        replacement, agent = raw["spec"]["replacement"], Member(raw["spec"]["replacement"], LONGEST)
        leads = Leader(WORKERS, self._limits, WINDOW, PATIENCE, LONGEST, replacement=replacement, now=self.now)
        name = raw["metadata"]["name"]
        pod = Pod(uid, name, index, attempt, replacement, agent if index else leads)
        self.pods.append(pod)
        if replacement:
            pod.started = 0
            self._put(awaiting_address(raw, timestamp(self.server.now)), raw)
        else:
            self._start_rank(pod, 0)

    def _put(self, changed: dict[str, Any], raw: dict[str, Any]) -> None:
        changed["status"]["podIP"] = raw["status"]["podIP"]
        self.server.put_pod(changed)

    def end_pod(self, pod: Pod) -> None:
        """All its processes end at once."""
        pod.alive, pod.rank, pod.links = False, None, {}
        pod.link = None

    def exits(self, pod: Pod, code: int, failure: RankFailure | None) -> None:
        """Its agent ends, which the kubelet sees, with what it has reported."""
        self.end_pod(pod)
        if (raw := self._raw(pod)) is not None:
            report = PodReport(progress=pod.report, failure=failure, restarts_in_place=pod.restarts)
            self._put(ended(raw, code, report=report, at=timestamp(self.server.now)), raw)

    # Ranks

    def _start_rank(self, pod: Pod, generation: int) -> None:
        pod.rank = pod.started = generation
        pod.step, pod.still_seconds, pod.end, pod.words = None, 0.0, None, None
        leader = pod if pod.index == 0 else pod.link.leader if pod.link is not None else self.current(0)
        pod.meets = leader.uid if leader is not None else ""
        pod.report, pod.began = RankReport(rank=pod.index, phase=RankPhase.STARTING, total_steps=_STEPS), None
        if (raw := self._raw(pod)) is not None:
            self._put(running(raw), raw)

    def rank_ends(self, pod: Pod, code: int, *, signaled: bool = False, leaves_state: bool = True) -> None:
        """Its agent sees that when it looks."""
        if pod.rank is None:
            return
        pod.rank = None
        pod.left_state = pod.step if leaves_state else None
        cause = RankFailure(rank=pod.index, exit_code=code, signal=code - 128 if code > 128 else None)
        checkpoint = self.checkpoint or None
        pod.end = PodFailure(cause=cause, signaled=signaled, checkpoint=checkpoint, began=pod.began)
        pod.words = RankFailure(rank=pod.index, exit_code=ExitCode.PEER_LOST, reason="PeerLost") if signaled else cause

    def group(self) -> list[Pod]:
        """All pods whose ranks train together now; none where they cannot."""
        for first in self.of(0):
            found = [first]
            for index in range(1, WORKERS):
                found += [pod for pod in self.of(index) if self._is_with(pod, first)][:1]
            if len(found) == WORKERS and first.rank is not None and not any(pod.apart for pod in found):
                return found
        return []

    def _is_with(self, pod: Pod, first: Pod) -> bool:
        return pod.rank is not None and (pod.attempt, pod.rank, pod.meets) == (first.attempt, first.rank, first.uid)

    def train(self, steps: int) -> None:
        """The ranks that can train do so many steps."""
        group = self.group()
        if not group:
            return
        first = group[0]
        assert first.rank is not None
        life = first.attempt, first.rank, first.uid
        if any(pod.step is None for pod in group):
            self._resume(group)
        for _ in range(steps):
            assert {pod.step for pod in group} == {len(self.effects)}, "a step is counted twice, or left out"
            assert all(life[:2] >= former[:2] for former in self.effects[-1:]), "an older generation trains"
            assert all(life == former for former in self.effects if former[:2] == life[:2]), "two of one number"
            self.effects.append(life)
            for pod in group:
                pod.step = len(self.effects)
        self.furthest = max(self.furthest, len(self.effects))
        self._report(group)

    def _resume(self, group: list[Pod]) -> None:
        offers = [Offer(pod.left_state, pod.index) for pod in group]
        found = choose(offers, [()] * WORKERS, self.checkpoint or None)
        step = found.step if isinstance(found, Choice) else self.checkpoint
        assert step <= len(self.effects), "a state of steps that the job has not done"
        del self.effects[step:]
        for pod in group:
            pod.step = pod.began = step

    def save(self) -> None:
        """The ranks that train write a checkpoint."""
        group = self.group()
        if group and group[0].step:
            self.checkpoint = max(self.checkpoint, group[0].step)
            self._report(group)

    def _report(self, group: list[Pod]) -> None:
        path, time = f"/checkpoints/x/step-{self.checkpoint}", timestamp(self.server.now)
        kept = CheckpointReport(step=self.checkpoint, path=path, time=time) if self.checkpoint else None
        for pod in group:
            pod.still_seconds = 0.0
            pod.report = RankReport(
                rank=pod.index, phase=RankPhase.TRAINING, step=pod.step or 0, total_steps=_STEPS, loss=0.5,
                checkpoint=kept, step_time=time, began=pod.began,
            )  # fmt: skip

    def peers_notice(self) -> None:
        """Ranks that no group has any more end. Behind a partition they wait: nobody there refuses anything."""
        group = self.group()
        for pod in (one for one in self.pods if one.alive and one.rank is not None and not one.apart):
            if pod not in group:
                self.rank_ends(pod, ExitCode.PEER_LOST)
        self.settle()

    # Agents

    def connect(self, pod: Pod, leader: Pod) -> None:
        """A worker's agent finds one of worker 0. Both have the key of the same attempt."""
        agent = pod.agent
        if pod.stopped or leader.stopped or pod.apart or leader.apart or pod.attempt != leader.attempt:
            return
        assert isinstance(agent, Member)
        if agent.left is not None:
            return
        if pod.link is not None:
            agent.lost(self.now)
        pod.link = Link(pod, leader)
        self.links.append(pod.link)
        agent.connected()
        self.settle()

    def closes(self, link: Link, *, at_leader: bool, at_member: bool) -> None:
        """An end of a connection, or both, see that it has ended."""
        pod, leader = link.member, link.leader
        if at_member and pod.link is link and not pod.stopped:
            pod.link = None
            assert isinstance(pod.agent, Member)
            pod.agent.lost(self.now)
        if at_leader and leader.links.get(pod.index) is link and not leader.stopped:
            del leader.links[pod.index]
            assert isinstance(leader.agent, Leader)
            leader.agent.lost(pod.index)
        self.settle()

    def hear(self, link: Link, *, up: bool) -> bool:
        """The next message of a connection is delivered, if there is one and its end takes any."""
        waiting, hearer = (link.up, link.leader) if up else (link.down, link.member)
        if not waiting or hearer.stopped or not hearer.alive or link.member.apart or link.leader.apart:
            return False
        message = waiting.popleft()
        if not up:
            if link.member.link is link and isinstance(link.member.agent, Member):
                link.member.agent.receive(message)
        elif isinstance(link.leader.agent, Leader):
            self._leader_hears(link, link.leader.agent, message)
        self.settle()
        return True

    def _leader_hears(self, link: Link, leader: Leader, message: Message) -> None:
        worker, links = link.member.index, link.leader.links
        if links.get(worker) is link:
            leader.receive(worker, message, self.now)
        elif message.kind == "joins":
            taken, answer = leader.admit(worker, message, self.now)
            if taken:
                links[worker] = link
            if answer is not None:
                link.down.append(answer)

    def settle(self) -> None:
        """What agents do at once."""
        for _ in range(4):
            for pod in [pod for pod in self.pods if pod.alive and not pod.stopped]:
                self._settle(pod)

    def _settle(self, pod: Pod) -> None:
        agent = pod.agent
        agent.tick(self.now)
        if pod.rank is not None and agent.kill is not None and agent.kill.rank in (None, pod.index):
            self.rank_ends(pod, 137)
        if pod.rank is not None and agent.must_stop:
            self.rank_ends(pod, ExitCode.PEER_LOST, signaled=True)
        if pod.end is not None:
            end, pod.end = pod.end, None
            if isinstance(agent, Leader):
                agent.ended(0, agent.generation, end, self.now)
            else:
                agent.ended(end, now=self.now)
        self._send(pod)
        if pod.rank is None and agent.generation > pod.started and agent.left is None:
            self._start_rank(pod, agent.generation)
        if pod.rank is None and agent.left is not None:
            self.exits(pod, ExitCode.PEER_LOST, pod.words or RankFailure(rank=pod.index, exit_code=ExitCode.PEER_LOST))

    def _send(self, pod: Pod) -> None:
        orders, pod.agent.orders = pod.agent.orders, []
        if isinstance(pod.agent, Member):
            if pod.link is not None:
                pod.link.up.extend(orders)
            return
        for link in pod.links.values():
            link.down.extend(orders)
        if pod.agent.due is None or pod.failed_at == "":
            pod.failed_at = timestamp(self.server.now)
        restart = pod.agent.restart
        if restart is not None and (pod.restarts is None or pod.restarts.count < restart.count):
            pod.restarts = RestartsInPlace(count=restart.count, time=pod.failed_at, failure=restart.cause)
            self.decided[pod.attempt] = max(self.decided.get(pod.attempt, 0), restart.count)

    def pass_time(self, seconds: float) -> None:
        self.server.now += timedelta(seconds=seconds)
        training = self.group()
        for pod in training:
            pod.still_seconds += seconds
        self.settle()
