"""An API server, kubelets and an operator in memory, for the state machine.

The server is the truth: versions, uids, preconditions, graces. The operator sees it through its real cache, fed by a
stream of events that comes late, twice, or breaks off, and by the answers to its own requests; its writes meet 409, 404
and refusals. Everything that it decides comes from the real `decide`.
"""

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from disttrain_api.names import Label, Role
from disttrain_operator.decide.clock import after, timestamp
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import (
    CreatePod,
    CreateSupport,
    Decision,
    DeleteJob,
    DeletePod,
    Order,
    RestartInPlace,
)
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.observed import CreateProblem, Job, Observed, job_facts
from disttrain_operator.decide.reading import observe
from disttrain_operator.kube.cache import Cache
from disttrain_operator.news import figures_alone, same_meaning
from disttrain_operator.plan.identity import child_name
from tests.builders import NOW, UID, a_raw_pod

Raw = dict[str, Any]
Request = Callable[[], None]


class Server:
    """What is true of one job and its pods."""

    def __init__(self, job: Raw) -> None:
        self.now: datetime = NOW
        self.version = 1
        self.job = job
        self.pods: dict[str, Raw] = {}
        self.streams: list[deque[tuple[str, Raw]]] = []
        """What each watch has yet to say of pods."""
        self.refuses: str | None = None
        self.created: list[tuple[str, str]] = []
        self.dead_nodes: set[str] = set()
        self.services: set[str] = set()

    def _next(self, raw: Raw) -> Raw:
        self.version += 1
        raw["metadata"]["resourceVersion"] = str(self.version)
        return raw

    def _tell(self, kind: str, raw: Raw) -> None:
        for stream in self.streams:
            stream.append((kind, deepcopy(raw)))

    def put_pod(self, pod: Raw) -> Raw:
        """A pod changes or appears."""
        name = pod["metadata"]["name"]
        kind = "MODIFIED" if name in self.pods else "ADDED"
        self.pods[name] = self._next(deepcopy(pod))
        self._tell(kind, self.pods[name])
        return deepcopy(self.pods[name])

    def disrupt(self, pod: Raw, reason: str, *, ready: bool) -> None:
        """The cluster ends a pod for this reason."""
        pod["status"]["conditions"] = [
            {"type": "Ready", "status": str(ready)},
            {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": ""},
        ]
        self.put_pod(pod)

    def remove_pod(self, name: str) -> None:
        """A pod is gone."""
        self._tell("DELETED", self._next(self.pods.pop(name)))

    def create_pod(self, pod: Raw) -> Raw | None:
        """POST; None where it is refused. A name that is taken is answered with its holder, as `create_child` does."""
        name = pod["metadata"]["name"]
        if name in self.pods:
            return deepcopy(self.pods[name])
        if self.refuses is not None:
            return None
        self.created.append((name, pod["metadata"]["uid"]))
        return self.put_pod(pod)

    def delete_pod(self, name: str, uid: str, grace: int | None) -> Raw | None:
        """DELETE with a uid; None where there is no such pod any more."""
        pod = deepcopy(self.pods.get(name))
        if pod is None or pod["metadata"]["uid"] != uid:
            return None
        metadata = pod["metadata"]
        seconds = 60 if grace is None else grace
        if seconds == 0 or "nodeName" not in pod["spec"]:
            self.remove_pod(name)
            return None
        if "deletionTimestamp" not in metadata:
            deadline = self.now + timedelta(seconds=seconds)
            metadata |= {"deletionTimestamp": timestamp(deadline), "deletionGracePeriodSeconds": seconds}
        elif seconds < (given := metadata["deletionGracePeriodSeconds"]):
            shorter = after(metadata["deletionTimestamp"], seconds - given)
            metadata |= {"deletionTimestamp": timestamp(shorter), "deletionGracePeriodSeconds": seconds}
        return self.put_pod(pod)

    def write_status(self, status: Raw, version: str) -> bool:
        """PUT; False where somebody was faster."""
        if self.job["metadata"]["resourceVersion"] != version:
            return False
        self.job = self._next({**self.job, "status": status})
        return True

    def edit(self, change: Callable[[Raw], None]) -> None:
        """A person edits the spec."""
        job = deepcopy(self.job)
        change(job["spec"])
        job["metadata"]["generation"] += 1
        self.job = self._next(job)


class Operator:
    """Caches and requests of one process. A new one starts with a complete list and no memory."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.job = deepcopy(server.job)
        self._facts: Job | None = None
        self.pods = Cache(group_of=lambda raw: raw["metadata"]["labels"][Label.JOB_UID])
        self.problems: dict[str, CreateProblem] = {}
        self.seen = Observed()
        """What the last decision was made from."""
        self.live: Live | None = None
        self.order: Order | None = None
        self.refuses: str | None = None
        """Why the agent follows no order to restart in place; None: it does."""
        """What an agent has answered."""
        self.supported: tuple[int, int] | None = None
        self.stream: deque[tuple[str, Raw]] = deque()
        server.streams.append(self.stream)
        self.relist()

    def relist(self) -> None:
        """The watch has lost its place."""
        self.stream.clear()
        self.pods.replace(deepcopy(list(self.server.pods.values())), self.server.version)

    def deliver(self, count: int, *, twice: bool = False) -> None:
        """The next events of the watch arrive."""
        for _ in range(min(count, len(self.stream))):
            kind, raw = self.stream.popleft()
            for _ in range(1 + twice):
                self.pods.apply(kind, deepcopy(raw))

    def read_job(self) -> None:
        """The job's own watch."""
        self.job = deepcopy(self.server.job)

    def facts(self) -> Job:
        """The facts of the job as it knows it. Reading the spec is most of the work."""
        former = self._facts if self._facts is not None and self._facts.generation == self._generation else None
        self._facts = job_facts(self.job, former=former)
        return self._facts

    @property
    def _generation(self) -> int:
        generation: int = self.job["metadata"]["generation"]
        return generation

    def decide(self) -> Decision:
        """What the operator decides from what it sees."""
        pods, services = (self.pods.group(UID), self.pods.gone(UID)), self.server.services
        seen = observe(*pods, self.problems.values(), services, live=self.live)
        self.seen = replace(seen, supported=self.supported, order=self.order)
        return decide(self.facts(), self.seen, self.server.now)

    def step(self, crash_after: int | None = None) -> bool:
        """One reconcile, of which only so many requests are made. Returns whether there was anything to do."""
        decision = self.decide()
        job = self.facts()
        busy = bool(decision.actions)
        made = 0
        if decision.status is not None and not same_meaning(decision.status, job.status):
            if crash_after == 0:
                return True
            written = decision.status.model_dump(mode="json", by_alias=True, exclude_none=True)
            if not self.server.write_status(written, job.resource_version):
                self.read_job()
                return True
            self.read_job()
            busy, made = True, 1
            if not decision.actions and figures_alone(decision.status, job.status):
                self._hold_that_nothing_follows(decision)
        self.problems = {}
        for action in decision.actions:
            if crash_after is not None and made >= crash_after:
                break
            self._act(action)
            made += 1
        return busy

    def _hold_that_nothing_follows(self, decision: Decision) -> None:
        """A write of figures is followed by no look of its own, so there must be nothing to find."""
        again = self.decide()
        assert again.actions == ()
        assert again.requeue_at == decision.requeue_at
        assert again.status is None or same_meaning(again.status, job_facts(self.job).status)

    def _act(self, action: Any) -> None:
        if isinstance(action, CreatePod):
            self._create(action)
        elif isinstance(action, DeletePod):
            answer = self.server.delete_pod(action.name, action.uid, action.grace_seconds)
            if answer is not None:
                self.pods.observe(answer)
        elif isinstance(action, CreateSupport):
            job = self.facts()
            self.server.services.add(child_name(job.name, job.uid))
            self.supported = max(self.supported or (0, 0), (action.attempt, action.tries))
        elif isinstance(action, RestartInPlace):
            self.order = Order(action, self.refuses)
        else:
            assert isinstance(action, DeleteJob)

    def _create(self, action: CreatePod) -> None:
        number = len(self.server.created) + 1
        pod = a_raw_pod(self.facts(), action.role, action.index, action.attempt, uid=f"uid-{number}")
        answer = self.server.create_pod(pod)
        if answer is None:
            name = pod["metadata"]["name"]
            self.problems[name] = CreateProblem("Pod", name, 403, str(self.server.refuses), "exceeded quota")
        else:
            self.pods.observe(answer)


def lost(pod: Raw) -> bool:
    """Whether its node is."""
    conditions = {entry["type"]: entry["status"] for entry in pod["status"].get("conditions", [])}
    return conditions.get("DisruptionTarget") == "True" and conditions.get("Ready") == "False"


def member(pod: Raw) -> tuple[Role, int, int]:
    """Role, index and attempt."""
    labels = pod["metadata"]["labels"]
    return Role(labels[Label.ROLE]), int(labels[Label.INDEX]), int(labels[Label.ATTEMPT])
