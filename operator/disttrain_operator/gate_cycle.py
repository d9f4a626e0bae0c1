"""One scheduling cycle of the gate over all waiting gangs: snapshot -> gangs to release, and why the others wait.
Pure; runs in a thread.

Nothing in a `ClusterSnapshot` changes during a cycle: caches replace objects, they do not alter them. An error about
one job delays no other.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property

from disttrain_api.names import Reason
from disttrain_api.scheduling import Topology
from disttrain_operator.decide.attempt_history import why_never_started
from disttrain_operator.decide.clock import after, timestamp
from disttrain_operator.decide.gang import expected, noted_successes
from disttrain_operator.decide.observed import Admission, ReadableJob, in_words
from disttrain_operator.gate.admit import BEHIND, Outcome, WaitingGang, order
from disttrain_operator.gate.fit import NodeFacts, unfit
from disttrain_operator.gate.place import Member, Together
from disttrain_operator.gate.read import ClusterPod
from disttrain_operator.gate.reservation import admit_in_period
from disttrain_operator.kube.cache import Raw

OTHERS_HOLD = "its pods wait for scheduling gates that are not the operator's"
# Each costs time in proportion to the nodes, and that time is everybody's.
MAX_GANGS_OF_A_NAMESPACE = 100
BEHIND_ITS_OWN = f"waits behind {MAX_GANGS_OF_A_NAMESPACE} other gangs of its namespace"

Identity = tuple[str, int]


@dataclass(frozen=True)
class WaitingJob:
    """A job whose gang does not run yet."""

    job: ReadableJob
    created: str
    """Its creationTimestamp."""


@dataclass(frozen=True)
class ClusterSnapshot:
    """What a cycle reads."""

    jobs: Sequence[WaitingJob]
    known: Sequence[Raw]
    """All jobs."""
    pods: Sequence[Raw]
    nodes: Sequence[Raw]
    granted: Mapping[str, Mapping[str, str]]
    """Job -> pod -> node: what was granted before."""
    waiting_since: datetime | None
    """Result of the last cycle; see gate/reservation.py."""
    now: datetime
    longest: timedelta


@dataclass
class GateDecision:
    """Result of a cycle."""

    admissions: dict[str, Admission] = field(default_factory=dict)
    """By the job's uid. It has no gangs that are not complete."""
    relied_on: dict[str, list[Raw]] = field(default_factory=dict)
    """Job -> its pods and their nodes, of what was granted now."""
    failures: dict[str, str] = field(default_factory=dict)
    """Job -> the error that its part of the cycle has raised."""
    waiting_since: datetime | None = None
    period_ends: datetime | None = None
    """When others may pass, or may no longer; None where that makes no difference."""


def decide_gangs(snapshot: ClusterSnapshot) -> GateDecision:
    """Return the decision about every job that waits."""
    return _Cycle(snapshot).run()


class _Usage:
    """The used capacity of each node."""

    def __init__(self) -> None:
        self.all: dict[str, dict[str, int]] = {}
        self.lasting: dict[str, dict[str, int]] = {}
        """By pods that belong to no job."""

    def count(self, node: str, requests: Iterable[tuple[str, int]], *, lasting: bool) -> None:
        for usage in (self.all, self.lasting) if lasting else (self.all,):
            taken = usage.setdefault(node, {})
            for resource, value in requests:
                taken[resource] = taken.get(resource, 0) + value


class _Cycle:
    """One cycle, step by step."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._snapshot = snapshot
        self._waiting = {waiting.job.uid: waiting for waiting in snapshot.jobs}
        self._namespaces = {raw["metadata"]["uid"]: raw["metadata"]["namespace"] for raw in snapshot.known}
        self._nodes: dict[str, NodeFacts] = {raw["metadata"]["name"]: raw["node"] for raw in snapshot.nodes}
        self._usage = _Usage()
        self._decision = GateDecision()

    def run(self) -> GateDecision:
        gangs = self._gangs(self._pods_of_waiting())
        candidates = [gang for uid, pods in gangs.items() if (gang := self._guarded(uid, pods)) is not None]
        self._admit(self._first_of_each_namespace(candidates))
        return self._decision

    def _pods_of_waiting(self) -> dict[str, list[ClusterPod]]:
        """The pods of each job that waits. Pods that have a node are counted there."""
        pods_of: dict[str, list[ClusterPod]] = {uid: [] for uid in self._waiting}
        for raw in self._snapshot.pods:
            pod: ClusterPod = raw["pod"]
            of_a_job = pod.job is not None and self._namespaces.get(pod.job) == pod.namespace
            if pod.node is not None and not pod.finished:
                self._usage.count(pod.node, pod.requests, lasting=not of_a_job)
            if of_a_job and pod.job in pods_of:
                pods_of[pod.job].append(pod)
        return pods_of

    def _gangs(self, pods_of: Mapping[str, list[ClusterPod]]) -> dict[str, "_Gang"]:
        """The gangs of the jobs that wait. What was let go and has no node yet counts where it was sent.

        Only members of such a gang may say where they were sent. Anybody else's pod without a node takes nothing.
        """
        gangs: dict[str, _Gang] = {}
        for uid, pods in pods_of.items():
            try:
                gang = _Gang(self._waiting[uid].job, pods)
                sent = gang.sent
            except Exception as error:
                self._fail(uid, error)
                continue
            gangs[uid] = gang
            for pod in sent:
                # Nothing was ever sent to a node that could not take it if it were empty.
                if pod.reserved is not None and self._suits(pod, pod.reserved):
                    self._usage.count(pod.reserved, pod.requests, lasting=False)
        return gangs

    def _suits(self, pod: ClusterPod, name: str) -> bool:
        node = self._nodes.get(name)
        return node is not None and pod.needs is not None and unfit(pod.needs, node) is None

    def _guarded(self, uid: str, gang: "_Gang") -> WaitingGang | None:
        try:
            return self._candidate(uid, gang)
        except Exception as error:
            self._fail(uid, error)
            return None

    def _candidate(self, uid: str, gang: "_Gang") -> WaitingGang | None:
        """The gang, where it is to be placed; else what is known of it is noted."""
        lost = frozenset(pod.uid for pod in gang.sent if self._is_lost(pod))
        if lost:
            self._decision.admissions[uid] = Admission(lost=lost)
            return None
        if not gang.waits:
            return None
        problem = next((pod.problem for pod in gang.members if pod.problem), "")
        if problem or any(pod.others_hold for pod in gang.members):
            self._decision.admissions[uid] = Admission(why=problem or OTHERS_HOLD)
            return None
        granted = self._still_granted(uid, gang)
        if granted is None:
            return gang.waiting(self._waiting[uid])
        for pod in gang.gated:
            self._usage.count(granted[pod.uid], pod.requests, lasting=False)
        self._decision.admissions[uid] = Admission(tuple(granted.items()))
        return None

    def _is_lost(self, pod: ClusterPod) -> bool:
        """Whether the node that a pod was sent to cannot take it any more: overbooked, or shut."""
        assert pod.reserved is not None
        if not self._suits(pod, pod.reserved):
            return True
        room, taken = self._nodes[pod.reserved].allocatable, self._usage.all.get(pod.reserved, {})
        return any(taken.get(resource, 0) > room.get(resource, 0) for resource, _ in pod.requests)

    def _still_granted(self, uid: str, gang: "_Gang") -> dict[str, str] | None:
        """Return what was granted and is not visible in the pods yet; None if the gang is to be placed."""
        granted = self._snapshot.granted.get(uid, {})
        if not all(self._suits(pod, granted.get(pod.uid, "")) for pod in gang.gated):
            return None
        return {pod.uid: granted[pod.uid] for pod in gang.gated}

    def _first_of_each_namespace(self, candidates: Iterable[WaitingGang]) -> list[WaitingGang]:
        """Return the gangs to consider; the others wait behind those of their namespace."""
        first, counted = [], Counter[str]()
        for gang in sorted(candidates, key=order):
            namespace = self._namespaces[gang.uid]
            counted[namespace] += 1
            if counted[namespace] <= MAX_GANGS_OF_A_NAMESPACE:
                first.append(gang)
            else:
                self._decision.admissions[gang.uid] = Admission(why=BEHIND_ITS_OWN)
        return first

    def _admit(self, gangs: list[WaitingGang]) -> None:
        snapshot = self._snapshot
        admitted = admit_in_period(
            gangs,
            list(self._nodes.values()),
            self._usage.all,
            self._usage.lasting,
            waiting_since=snapshot.waiting_since,
            now=snapshot.now,
            longest=snapshot.longest,
        )
        self._decision.waiting_since = admitted.waiting_since
        self._decision.period_ends = admitted.period.until if admitted.waiting_since is not None else None
        for uid, outcome in admitted.outcomes.items():
            self._decision.admissions[uid] = _admission(outcome, admitted.period.until)
            if outcome.failed:
                self._decision.failures[uid] = outcome.why
        self._note_what_was_relied_on(admitted.outcomes)

    def _note_what_was_relied_on(self, outcomes: Mapping[str, Outcome]) -> None:
        pods = {raw["metadata"]["uid"]: raw for raw in self._snapshot.pods}
        nodes = {raw["metadata"]["name"]: raw for raw in self._snapshot.nodes}
        for uid, outcome in outcomes.items():
            if outcome.placement is not None:
                names = set(outcome.placement.values())
                self._decision.relied_on[uid] = [pods[pod] for pod in outcome.placement] + [
                    nodes[name] for name in names
                ]

    def _fail(self, uid: str, error: Exception) -> None:
        why = f"the gate has failed to look at it ({in_words(error)})"
        self._decision.admissions[uid] = Admission(why=why)
        self._decision.failures[uid] = why


def _admission(outcome: Outcome, period_ends: datetime) -> Admission:
    if outcome.placement is not None:
        return Admission(tuple(outcome.placement.items()))
    if outcome.why == BEHIND:
        return Admission(why=f"{BEHIND}; they keep them until {timestamp(period_ends)} at most")
    return Admission(why=outcome.why)


class _Gang:
    """The pods of a job's current attempt."""

    def __init__(self, job: ReadableJob, pods: Iterable[ClusterPod]) -> None:
        self._spec = job.spec
        done = noted_successes(job.spec, job.status)
        wanted: list[Identity] = [
            (role.value, index) for role, index in expected(job.spec) if (role, index) not in done
        ]
        attempt = str(job.status.attempt)
        current = {
            pod.identity: pod for pod in pods if pod.attempt == attempt and not pod.deleting and not pod.finished
        }
        self.members = [current[identity] for identity in wanted if identity in current]
        """One for each identity, in the order of ranks."""
        self._complete = len(self.members) == len(wanted)

    @cached_property
    def gated(self) -> list[ClusterPod]:
        """Members that the gate holds."""
        return [pod for pod in self.members if pod.gated]

    @cached_property
    def sent(self) -> list[ClusterPod]:
        """Members that were let go and have no node yet."""
        return [pod for pod in self.members if not pod.gated and pod.node is None and pod.reserved is not None]

    @property
    def waits(self) -> bool:
        """Whether it is complete and not all of it has been let go."""
        return self._complete and bool(self.gated)

    def waiting(self, waiting: WaitingJob) -> WaitingGang:
        """The gang as the gate's arithmetic sees it."""
        attempts = waiting.job.status.attempts
        standing = [(pod, pod.node or pod.reserved) for pod in self.members if not pod.gated]
        return WaitingGang(
            uid=waiting.job.uid,
            members=tuple(Member(pod.uid, pod.needs, pod.group) for pod in self.gated if pod.needs is not None),
            created=_in_line_since(waiting),
            priority=max(pod.priority for pod in self.members),
            together=_together(self._spec.run_policy.scheduling_policy.topology),
            standing={pod.uid: node for pod, node in standing if node is not None},
            groups={pod.uid: pod.group for pod, _ in standing},
            waiting_since=after(attempts[-1].start_time, 0),
        )


def _in_line_since(waiting: WaitingJob) -> str:
    """Return the age that decides its place: its job's, or its attempt's if the scheduler refused the room it had."""
    status = waiting.job.status
    before = why_never_started(status)
    if before is None or before.reason != Reason.UNSCHEDULABLE:
        return waiting.created
    return status.attempts[-1].start_time


def _together(topology: Topology | None) -> Together | None:
    if topology is None:
        return None
    return Together(topology.required or topology.preferred or "", required=topology.required is not None)
