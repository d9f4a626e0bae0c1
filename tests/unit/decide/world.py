"""A cluster in memory that obeys decisions as the real one does: statuses first, then actions."""

from copy import deepcopy as deep
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from disttrain_api.names import Role
from disttrain_operator.decide.clock import after, timestamp
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import CreatePod, CreateSupport, Decision, DeleteJob, DeletePod, Event
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.observed import CreateProblem, Job, PodEvent, job_facts
from disttrain_operator.decide.reading import observe
from disttrain_operator.plan.identity import child_name
from tests.builders import NOW, a_raw_job, a_raw_pod, ended, running

RawPod = dict[str, Any]


@dataclass
class World:
    """One job, its pods, a clock."""

    raw_job: dict[str, Any]
    now: datetime = NOW
    pods: dict[str, RawPod] = field(default_factory=dict)
    gone: list[RawPod] = field(default_factory=list)
    problems: list[CreateProblem] = field(default_factory=list)
    pod_event: PodEvent | None = None
    live: Live | None = None
    unreachable: set[str] = field(default_factory=set)
    """Uids of pods at whose addresses nothing answers."""
    silent: set[str] = field(default_factory=set)
    """Uids of pods whose agents do not answer though their nodes live."""
    events: list[Event] = field(default_factory=list)
    status_writes: int = 0
    created: int = 0
    deleted: bool = False
    services: set[str] = field(default_factory=set)
    supports: list[CreateSupport] = field(default_factory=list)
    """What was asked for besides pods."""

    @property
    def job(self) -> Job:
        return job_facts(self.raw_job)

    def decide(self) -> Decision:
        """What the operator decides now."""
        supported = (self.supports[-1].attempt, self.supports[-1].tries) if self.supports else None
        observed = observe(self.pods.values(), self.gone, self.problems, self.services, pod_event=self.pod_event)
        observed = replace(
            observed, supported=supported, live=self.live, unreachable=frozenset(self.unreachable),
            silent=frozenset(self.silent),
        )  # fmt: skip
        return decide(self.job, observed, self.now)

    def step(self, *, crash_after: int | None = None, repeat: int = 1) -> Decision:
        """One reconcile: status write, actions, events. `crash_after` n: only the first n requests happen."""
        decision = self.decide()
        requests = [*([self._write] if self._changes(decision) else []), *([self._act] * len(decision.actions))]
        actions = iter(decision.actions)
        for request in requests[:crash_after]:
            if request == self._write:
                self._write(decision)
                continue
            action = next(actions)
            for _ in range(repeat):
                self._act(action)
        if self._write in requests[:crash_after]:
            self.events += decision.events
        return decision

    def settle(self, rounds: int = 20) -> "World":
        """Reconcile until nothing is left to do. Fails where that takes too long."""
        for _ in range(rounds):
            decision = self.decide()
            if not self._changes(decision) and not decision.actions:
                return self
            self.step()
        raise AssertionError(f"not at rest after {rounds} rounds: {self.decide()}")

    def pass_time(self, seconds: float) -> "World":
        self.now += timedelta(seconds=seconds)
        return self

    def pod(self, index: int = 0, role: Role = Role.WORKER) -> RawPod:
        """The pod of the newest attempt."""
        found = [pod for pod in self.pods.values() if _member(pod) == (role.value, str(index))]
        return max(found, key=lambda pod: int(pod["metadata"]["labels"]["disttrain.io/attempt"]))

    def put(self, pod: RawPod) -> "World":
        self.pods[pod["metadata"]["name"]] = pod
        return self

    def run_all(self) -> "World":
        """The kubelets start every pod."""
        for pod in list(self.pods.values()):
            if pod["status"]["phase"] == "Pending":
                self.put(running(pod))
        return self.settle()

    def end(self, index: int, code: int, role: Role = Role.WORKER, **how: Any) -> "World":
        at = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        self.put(ended(self.pod(index, role), code, **{"at": at, **how}))
        return self

    def remove(self, name: str, *, remembered: bool = True) -> None:
        """The kubelet confirms a deletion, or a person forces one."""
        pod = self.pods.pop(name)
        if remembered:
            self.gone.append(pod)

    def drain(self, index: int, reason: str | None = "EvictionByEvictionAPI", *, ready: bool = True) -> "World":
        """Somebody ends a pod that runs. `reason` None: a person, by hand."""
        pod = deep(self.pod(index))
        conditions = [{"type": "Ready", "status": str(ready)}]
        if reason is not None:
            conditions.append({"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "no room"})
        pod["status"]["conditions"] = conditions
        self._delete(pod, None)
        self.put(pod)
        return self

    def confirm_deletions(self) -> "World":
        """Pods that are being deleted have stopped and are gone."""
        for name, pod in list(self.pods.items()):
            if "deletionTimestamp" in pod["metadata"]:
                self.remove(name)
        return self

    def edit(self, **spec: Any) -> "World":
        from tests.builders import merge

        self.raw_job["spec"] = merge(self.raw_job["spec"], spec)
        self.raw_job["metadata"]["generation"] += 1
        return self

    def condition(self, type_: str) -> tuple[str, str, str]:
        """(status, reason, message)."""
        entry = next(entry for entry in self.job.status.conditions if entry.type == type_)
        return entry.status, entry.reason, entry.message

    def _changes(self, decision: Decision) -> bool:
        return decision.status is not None and decision.status != self.job.status

    def _write(self, decision: Decision) -> None:
        self.raw_job["status"] = decision.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.status_writes += 1

    def _act(self, action: Any) -> None:
        if isinstance(action, CreatePod):
            self._create(action)
        elif isinstance(action, DeletePod):
            pod = self.pods.get(action.name)
            if pod is not None and pod["metadata"]["uid"] == action.uid:
                self._delete(pod, action.grace_seconds)
        elif isinstance(action, DeleteJob):
            self.deleted = True
        else:
            assert isinstance(action, CreateSupport)
            self.services.add(child_name(self.job.name, self.job.uid))
            self.supports.append(action)

    def _delete(self, pod: RawPod, grace: int | None) -> None:
        if grace == 0 and not pod["metadata"].get("finalizers"):
            self.remove(pod["metadata"]["name"])
            return
        metadata = pod["metadata"]
        seconds = 60 if grace is None else grace
        if "deletionTimestamp" not in metadata:
            deadline = self.now + timedelta(seconds=seconds)
            metadata |= {"deletionTimestamp": timestamp(deadline), "deletionGracePeriodSeconds": seconds}
        elif seconds < (given := metadata.get("deletionGracePeriodSeconds", 0)):  # a grace can only be shortened
            shorter = after(metadata["deletionTimestamp"], seconds - given)
            metadata |= {"deletionTimestamp": timestamp(shorter), "deletionGracePeriodSeconds": seconds}

    def _create(self, action: CreatePod) -> None:
        self.created += 1
        pod = a_raw_pod(
            self.job, action.role, action.index, action.attempt, uid=f"uid-{self.created}", dead=action.dead
        )
        name = pod["metadata"]["name"]
        if name not in self.pods:  # else the API server answers 409
            self.put(pod)


def a_world(**spec: Any) -> World:
    """A job that was just applied."""
    return World(a_raw_job(**spec))


def a_running_world(**spec: Any) -> World:
    """A job whose first attempt runs."""
    return a_world(**spec).settle().run_all()


def _member(pod: RawPod) -> tuple[str, str]:
    labels = pod["metadata"]["labels"]
    return labels["disttrain.io/role"], labels["disttrain.io/index"]


__all__ = ["World", "a_running_world", "a_world", "replace"]
