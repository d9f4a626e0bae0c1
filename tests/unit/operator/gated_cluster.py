"""Nodes, pods and jobs, as the gate's watches tell of them."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from disttrain_api.names import Role
from disttrain_api.ownership import owner_reference
from disttrain_operator.decide.observed import Admission
from disttrain_operator.gatekeeper import Gatekeeper
from disttrain_operator.plan.identity import pod_labels
from disttrain_operator.snapshot import World
from tests.builders import a_raw_job

GPU = "nvidia.com/gpu"
HELD = [{"name": "disttrain.io/gang"}]


def a_pods_metadata(job: str, index: int) -> dict[str, Any]:
    """Metadata of a pod that the operator made for the job."""
    return {
        "name": f"{job}-{index}",
        "namespace": "default",
        "uid": f"{job}-{index}",
        "labels": pod_labels(job, job, Role.WORKER, index, 1),
        "ownerReferences": [owner_reference(job, job)],
    }


@dataclass
class Cluster:
    """Nodes, pods and jobs, as the gate's watches tell of them."""

    world: World = field(default_factory=World)
    woken: list[str] = field(default_factory=list)
    version: int = 10
    acts: bool = True
    now: datetime = datetime(2026, 1, 1, 12, 0, 30, tzinfo=UTC)

    def __post_init__(self) -> None:
        self.gate = Gatekeeper(self.world, self.woken.append, lambda: self.acts, now=lambda: self.now)
        for cache in (self.world.jobs, self.gate.nodes, self.gate.pods):
            cache.replace([], 1)

    def next(self, raw: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        raw["metadata"]["resourceVersion"] = str(self.version)
        return raw

    def node(self, name: str, gpus: int = 8, *, ready: bool = True) -> None:
        status = {
            "allocatable": {GPU: str(gpus), "pods": "10"},
            "conditions": [{"type": "Ready", "status": str(ready)}],
        }
        raw = {"metadata": {"name": name, "uid": name}, "spec": {}, "status": status}
        self.gate.nodes.apply("MODIFIED", self.next(raw))

    def job(self, name: str, replicas: int = 2, age: int = 0, **status: Any) -> None:
        attempt = {"number": 1, "startTime": "2026-01-01T12:00:00Z"}
        raw = a_raw_job(
            name,
            status={"attempt": 1, "attempts": [attempt], **status},
            workers={"replicas": replicas},
            runPolicy={"schedulingPolicy": {"gangScheduler": "Gate"}},
        )
        raw["metadata"] |= {"uid": name, "creationTimestamp": f"2026-01-01T12:00:{30 - age:02}Z"}
        self.world.jobs.apply("MODIFIED", self.next(raw))

    def pod(self, job: str, index: int, gpus: int = 8, *, node: str | None = None, **others: Any) -> None:
        """A pod of a job; held by the gate, unless it has a node."""
        raw = {
            "metadata": {**a_pods_metadata(job, index), **others},
            "spec": {"containers": [{"resources": {"requests": {GPU: str(gpus)}}}]},
            "status": {"phase": "Pending"},
        }
        raw["spec"] |= {"nodeName": node} if node else {"schedulingGates": HELD}
        self.gate.pods.apply("MODIFIED", self.next(raw))

    def sent(self, job: str, index: int, node: str) -> None:
        """A pod that was let go, and has no node yet."""
        noted = {"annotations": {"disttrain.io/reserved-node": node}}
        raw = {
            "metadata": {**a_pods_metadata(job, index), **noted},
            "spec": {"containers": [{"resources": {"requests": {GPU: "8"}}}]},
            "status": {"phase": "Pending"},
        }
        self.gate.pods.apply("MODIFIED", self.next(raw))

    def stranger(self, name: str, node: str, gpus: int = 8, phase: str = "Running") -> None:
        raw = {
            "metadata": {"name": name, "uid": name},
            "spec": {"nodeName": node, "containers": [{"resources": {"requests": {GPU: str(gpus)}}}]},
            "status": {"phase": phase},
        }
        self.gate.pods.apply("MODIFIED", self.next(raw))

    def gang(self, name: str, replicas: int = 2, **how: Any) -> None:
        self.job(name, replicas, **how)
        for index in range(replicas):
            self.pod(name, index)

    async def close(self) -> None:
        """No cycle outlives the test."""
        await self.gate.close()

    async def answer(self, name: str) -> Admission:
        await self.gate.run_cycle()
        job = self.world.job(name)
        assert job is not None
        found = self.gate.admission(job)
        assert found is not None
        return found
