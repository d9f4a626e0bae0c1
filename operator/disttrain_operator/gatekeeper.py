"""The gate's shell: watches all nodes and pods, and has `gate.admit` look at all waiting gangs whenever they change.

One look at a time, and what it admits is reserved until the pods themselves show that they were let go: two gangs that
fit only one at a time never both go. A look costs time in proportion to the cluster, so it rests afterwards.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from disttrain_api.scheduling import GangScheduler, Topology
from disttrain_operator.decide.finished import is_finished
from disttrain_operator.decide.gang import expected
from disttrain_operator.decide.ledger import in_attempt, ran
from disttrain_operator.decide.observed import Admission, Job
from disttrain_operator.gate.admit import Outcome, WaitingGang, admit
from disttrain_operator.gate.fit import NodeFacts, unfit
from disttrain_operator.gate.place import Member, Together
from disttrain_operator.gate.read import ClusterPod, cluster_pod, node_facts
from disttrain_operator.kube.cache import Cache, Raw
from disttrain_operator.snapshot import World

FIRST_REST = 0.02
REST_PER_SECOND_OF_WORK = 10.0
# A busy cluster changes the numbers all the time; each change of a sentence is a request.
SENTENCE_SECONDS = 30.0
OTHERS_HOLD = "its pods wait for scheduling gates that are not the operator's"

_ALL = "all"


def trim_node(raw: Raw) -> Raw:
    """A node as the gate sees it."""
    return {"metadata": _identity(raw), "node": node_facts(raw)}


def trim_cluster_pod(raw: Raw) -> Raw:
    """A pod as the gate sees it."""
    return {"metadata": _identity(raw), "pod": cluster_pod(raw)}


def _identity(raw: Raw) -> Raw:
    return {key: raw["metadata"].get(key) for key in ("name", "uid", "resourceVersion")}


@dataclass
class _Usage:
    """What is taken of each node."""

    all: dict[str, dict[str, int]] = field(default_factory=dict)
    lasting: dict[str, dict[str, int]] = field(default_factory=dict)
    """By pods that belong to no job."""

    def count(self, node: str, requests: Iterable[tuple[str, int]], *, lasting: bool) -> None:
        for usage in (self.all, self.lasting) if lasting else (self.all,):
            taken = usage.setdefault(node, {})
            for resource, value in requests:
                taken[resource] = taken.get(resource, 0) + value


class Gatekeeper:
    """Fill `nodes` and `pods` by informers of the whole cluster. `wake` is called with the uid of a job that is to be
    looked at."""

    def __init__(self, world: World, wake: Callable[[str], None], active: Callable[[], bool] = lambda: True) -> None:
        self._world, self._wake, self._active = world, wake, active
        self.nodes = Cache(group_of=lambda raw: _ALL, trim=trim_node, on_change=self._changed)
        self.pods = Cache(group_of=lambda raw: _ALL, trim=trim_cluster_pod, on_change=self._changed, gone_seconds=10)
        self._answers: dict[str, Admission] = {}
        self._granted: dict[str, dict[str, str]] = {}
        self._said: dict[str, tuple[float, str]] = {}
        self._not_before = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def admission(self, job: Job) -> Admission | None:
        """What is known of the job's gang now; None where it does not ask for the gate."""
        if job.spec is None or job.spec.run_policy.scheduling_policy.gang is not GangScheduler.GATE:
            return None
        return self._answers.get(job.uid, Admission())

    def begin(self) -> None:
        """This replica acts from now on. What it granted before, another may have given away since."""
        self._granted.clear()
        self._answers.clear()
        self._look_in(0)

    def _changed(self, group: str, raw: Raw) -> None:
        self._look_in(FIRST_REST)

    def _look_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        at = max(loop.time() + seconds, self._not_before)
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        began = time.perf_counter()
        self.look()
        rest = (time.perf_counter() - began) * REST_PER_SECOND_OF_WORK
        self._not_before = asyncio.get_running_loop().time() + rest

    def look(self) -> None:
        """Judge all waiting gangs anew, and wake the jobs for which something changed."""
        answers: dict[str, Admission] = {}
        waiting = self._waiting_jobs() if self._active() else {}
        if waiting and self.nodes.synced and self.pods.synced:
            answers = self._judge(waiting)
        before, self._answers = self._answers, answers
        for memory in (self._granted, self._said):
            for uid in memory.keys() - answers.keys():
                del memory[uid]
        for uid in answers.keys() | before.keys():
            if answers.get(uid) != before.get(uid):
                self._wake(uid)

    def _waiting_jobs(self) -> dict[str, Job]:
        jobs = (self._world.job(uid) for uid in self._world.jobs.groups())
        return {job.uid: job for job in jobs if job is not None and _waits(job)}

    def _judge(self, waiting: Mapping[str, Job]) -> dict[str, Admission]:
        usage, gangs = _Usage(), {uid: list[ClusterPod]() for uid in waiting}
        for raw in self.pods.group(_ALL):
            pod: ClusterPod = raw["pod"]
            if pod.node is not None and not pod.finished:
                usage.count(pod.node, pod.requests, lasting=pod.job is None)
            if pod.job in gangs:
                gangs[pod.job].append(pod)
        nodes = {raw["metadata"]["name"]: raw["node"] for raw in self.nodes.group(_ALL)}
        answers: dict[str, Admission] = {}
        candidates = []
        for uid, job in waiting.items():
            lost = frozenset(pod.uid for pod in gangs[uid] if _lost(pod, nodes, usage.all))
            if lost:
                answers[uid] = Admission(lost=lost)
                continue
            pods = _complete(job, gangs[uid])
            if pods is None:
                continue
            if any(pod.others_hold for pod in pods):
                answers[uid] = Admission(why=OTHERS_HOLD)
            elif (granted := self._still_granted(uid, pods, nodes)) is not None:
                for pod in pods:
                    if pod.uid in granted:
                        usage.count(granted[pod.uid], pod.requests, lasting=False)
                answers[uid] = Admission(tuple(granted.items()))
            else:
                candidates.append(_gang(job, pods, self._created(uid)))
        outcomes = admit(candidates, list(nodes.values()), usage.all, usage.lasting)
        return answers | {uid: self._answer(uid, outcome) for uid, outcome in outcomes.items()}

    def _still_granted(self, uid: str, pods: list[ClusterPod], nodes: Mapping[str, NodeFacts]) -> dict[str, str] | None:
        """What was granted and is not visible in the pods yet; None where the gang has to be judged."""
        granted, held = self._granted.get(uid, {}), [pod for pod in pods if pod.held]
        for pod in held:
            node = nodes.get(granted.get(pod.uid, ""))
            if node is None or pod.needs is None or unfit(pod.needs, node) is not None:
                self._granted.pop(uid, None)
                return None
        return {pod.uid: granted[pod.uid] for pod in held}

    def _answer(self, uid: str, outcome: Outcome) -> Admission:
        if outcome.placement is not None:
            self._granted[uid] = dict(outcome.placement)
            self._said.pop(uid, None)
            return Admission(tuple(outcome.placement.items()))
        now = time.monotonic()
        since, said = self._said.get(uid, (float("-inf"), ""))
        if outcome.why != said and now - since < SENTENCE_SECONDS:
            self._look_in(since + SENTENCE_SECONDS - now)
            return Admission(why=said)
        if outcome.why != said:
            self._said[uid] = (now, outcome.why)
        return Admission(why=outcome.why)

    def _created(self, uid: str) -> str:
        raw = self._world.jobs.get(uid)
        created: str = (raw["metadata"].get("creationTimestamp") or "") if raw is not None else ""
        return created


def _waits(job: Job) -> bool:
    if job.spec is None or job.spec.run_policy.scheduling_policy.gang is not GangScheduler.GATE:
        return False
    return not job.deleting and in_attempt(job.status) and not ran(job.status) and not is_finished(job)


def _lost(pod: ClusterPod, nodes: Mapping[str, NodeFacts], used: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether a pod was sent to a node that cannot take it any more: overbooked, or shut."""
    if pod.held or pod.bound or pod.deleting or pod.needs is None or pod.node is None:
        return False
    node, taken = nodes.get(pod.node), used.get(pod.node, {})
    if node is None or unfit(pod.needs, node) is not None:
        return True
    return any(taken.get(resource, 0) > node.allocatable.get(resource, 0) for resource, _ in pod.requests)


def _complete(job: Job, pods: list[ClusterPod]) -> list[ClusterPod] | None:
    """The pods of the current attempt in the order of ranks; None where one is missing, or none is held."""
    assert job.spec is not None
    current = {
        pod.identity: pod
        for pod in pods
        if pod.attempt == str(job.status.attempt) and not pod.deleting and not pod.finished
    }
    members = [current.get((role.value, index)) for role, index in expected(job.spec)]
    found = [pod for pod in members if pod is not None]
    return found if len(found) == len(members) and any(pod.held for pod in found) else None


def _gang(job: Job, pods: list[ClusterPod], created: str) -> WaitingGang:
    assert job.spec is not None
    return WaitingGang(
        uid=job.uid,
        members=tuple(Member(pod.uid, pod.needs, pod.group) for pod in pods if pod.needs is not None),
        created=created,
        priority=max(pod.priority for pod in pods),
        together=_together(job.spec.run_policy.scheduling_policy.topology),
        standing={pod.uid: pod.node for pod in pods if not pod.held and pod.node is not None},
        groups={pod.uid: pod.group for pod in pods if not pod.held},
    )


def _together(topology: Topology | None) -> Together | None:
    if topology is None:
        return None
    return Together(topology.required or topology.preferred or "", required=topology.required is not None)
