"""The gate's shell: what it sees, what it reserves, when it speaks."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from disttrain_api.names import Role
from disttrain_operator import gatekeeper
from disttrain_operator.decide.observed import Admission
from disttrain_operator.gatekeeper import Gatekeeper
from disttrain_operator.plan.identity import pod_labels
from disttrain_operator.snapshot import World
from tests.builders import a_raw_job

GPU = "nvidia.com/gpu"
HELD = [{"name": "disttrain.io/gang"}]


@dataclass
class Cluster:
    """Nodes, pods and jobs, as the gate's watches tell of them."""

    world: World = field(default_factory=World)
    woken: list[str] = field(default_factory=list)
    version: int = 10
    acts: bool = True

    def __post_init__(self) -> None:
        self.gate = Gatekeeper(self.world, self.woken.append, lambda: self.acts)
        for cache in (self.world.jobs, self.gate.nodes, self.gate.pods):
            cache.replace([], 1)

    def _next(self, raw: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        raw["metadata"]["resourceVersion"] = str(self.version)
        return raw

    def node(self, name: str, gpus: int = 8, *, ready: bool = True) -> None:
        status = {
            "allocatable": {GPU: str(gpus), "pods": "10"},
            "conditions": [{"type": "Ready", "status": str(ready)}],
        }
        raw = {"metadata": {"name": name, "uid": name}, "spec": {}, "status": status}
        self.gate.nodes.apply("MODIFIED", self._next(raw))

    def job(self, name: str, replicas: int = 2, age: int = 0, **status: Any) -> None:
        attempt = {"number": 1, "startTime": "2026-01-01T12:00:00Z"}
        raw = a_raw_job(
            name,
            status={"attempt": 1, "attempts": [attempt], **status},
            workers={"replicas": replicas},
            runPolicy={"schedulingPolicy": {"gang": "Gate"}},
        )
        raw["metadata"] |= {"uid": name, "creationTimestamp": f"2026-01-01T12:00:{30 - age:02}Z"}
        self.world.jobs.apply("MODIFIED", self._next(raw))

    def pod(self, job: str, index: int, gpus: int = 8, *, node: str | None = None, **others: Any) -> None:
        """A pod of a job; held by the gate, unless it has a node."""
        labels = pod_labels(job, job, Role.WORKER, index, 1)
        raw = {
            "metadata": {"name": f"{job}-{index}", "uid": f"{job}-{index}", "labels": labels, **others},
            "spec": {"containers": [{"resources": {"requests": {GPU: str(gpus)}}}]},
            "status": {"phase": "Pending"},
        }
        raw["spec"] |= {"nodeName": node} if node else {"schedulingGates": HELD}
        self.gate.pods.apply("MODIFIED", self._next(raw))

    def sent(self, job: str, index: int, node: str) -> None:
        """A pod that was let go, and has no node yet."""
        labels, noted = pod_labels(job, job, Role.WORKER, index, 1), {"disttrain.io/reserved-node": node}
        raw = {
            "metadata": {"name": f"{job}-{index}", "uid": f"{job}-{index}", "labels": labels, "annotations": noted},
            "spec": {"containers": [{"resources": {"requests": {GPU: "8"}}}]},
            "status": {"phase": "Pending"},
        }
        self.gate.pods.apply("MODIFIED", self._next(raw))

    def stranger(self, name: str, node: str, gpus: int = 8, phase: str = "Running") -> None:
        raw = {
            "metadata": {"name": name, "uid": name},
            "spec": {"nodeName": node, "containers": [{"resources": {"requests": {GPU: str(gpus)}}}]},
            "status": {"phase": phase},
        }
        self.gate.pods.apply("MODIFIED", self._next(raw))

    def gang(self, name: str, replicas: int = 2, **how: Any) -> None:
        self.job(name, replicas, **how)
        for index in range(replicas):
            self.pod(name, index)

    def answer(self, name: str) -> Admission:
        self.gate.look()
        job = self.world.job(name)
        assert job is not None
        found = self.gate.admission(job)
        assert found is not None
        return found


@pytest.fixture
async def cluster() -> Cluster:
    made = Cluster()
    made.node("a")
    made.node("b")
    return made


async def test_a_gang_is_judged_when_all_of_its_pods_are_there(cluster: Cluster) -> None:
    cluster.job("one")
    cluster.pod("one", 0)
    assert cluster.answer("one") == Admission()
    cluster.pod("one", 1)
    assert dict(cluster.answer("one").nodes) == {"one-0": "a", "one-1": "b"}
    assert cluster.woken == ["one"]


async def test_what_is_granted_is_reserved_until_the_pods_show_it(cluster: Cluster) -> None:
    cluster.gang("one", age=1)
    cluster.gang("two")
    assert cluster.answer("one").nodes
    assert cluster.answer("two").why.startswith("needs 2 pods x 8 nvidia.com/gpu; 0 fit")
    cluster.pod("one", 0, node="a")
    assert dict(cluster.answer("one").nodes) == {"one-1": "b"}
    cluster.pod("one", 1, node="b")
    assert cluster.answer("one") == Admission()
    assert not cluster.answer("two").nodes


async def test_a_released_pod_that_no_node_has_taken_yet_counts_where_it_was_sent(cluster: Cluster) -> None:
    cluster.job("one", 1, age=1)
    cluster.pod("one", 0, annotations={"disttrain.io/reserved-node": "a"})
    raw = cluster.gate.pods.get("one-0")
    assert raw is not None
    sent = {
        "metadata": {
            "name": "one-0",
            "uid": "one-0",
            "labels": pod_labels("one", "one", Role.WORKER, 0, 1),
            "annotations": {"disttrain.io/reserved-node": "a"},
        },
        "spec": {"containers": [{"resources": {"requests": {GPU: "8"}}}]},
    }
    cluster.gate.pods.apply("MODIFIED", cluster._next(sent))
    cluster.gang("two", 1)
    assert dict(cluster.answer("two").nodes) == {"two-0": "b"}


async def test_a_grant_on_a_node_that_is_lost_is_judged_anew(cluster: Cluster) -> None:
    cluster.gang("one", 1)
    assert dict(cluster.answer("one").nodes) == {"one-0": "a"}
    cluster.node("a", ready=False)
    assert dict(cluster.answer("one").nodes) == {"one-0": "b"}


async def test_pods_of_others_count_while_they_run(cluster: Cluster) -> None:
    cluster.stranger("s", "a")
    cluster.gang("one")
    assert "1 has too little nvidia.com/gpu free" in cluster.answer("one").why
    cluster.stranger("s", "a", phase="Succeeded")
    assert cluster.answer("one").nodes
    assert cluster.woken == ["one", "one"]


async def test_a_gang_with_a_pod_that_is_being_deleted_waits_for_its_successor(cluster: Cluster) -> None:
    cluster.gang("one")
    cluster.pod("one", 1, deletionTimestamp="2026-01-01T12:00:00Z")
    assert cluster.answer("one") == Admission()


async def test_gates_of_others_come_first(cluster: Cluster) -> None:
    cluster.gang("one", 1)
    raw = {
        "metadata": {"name": "one-0", "uid": "one-0", "labels": pod_labels("one", "one", Role.WORKER, 0, 1)},
        "spec": {"containers": [], "schedulingGates": [*HELD, {"name": "theirs"}]},
    }
    cluster.gate.pods.apply("MODIFIED", cluster._next(raw))
    assert cluster.answer("one") == Admission(why=gatekeeper.OTHERS_HOLD)


async def test_a_sentence_whose_numbers_change_all_the_time_is_said_now_and_then(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(gatekeeper.time, "monotonic", lambda: now[0])
    cluster.gang("one", 3)
    first = cluster.answer("one").why
    cluster.stranger("s", "a")
    assert cluster.answer("one").why == first
    assert cluster.woken == ["one"]
    now[0] += gatekeeper.SENTENCE_SECONDS
    assert cluster.answer("one").why != first
    assert cluster.woken == ["one", "one"]


async def test_jobs_that_run_or_have_ended_are_no_concern(cluster: Cluster) -> None:
    ran = {"number": 1, "startTime": "2026-01-01T12:00:00Z", "runningTime": "2026-01-01T12:00:00Z"}
    cluster.gang("runs", 1, attempts=[ran])
    ended = {**ran, "endTime": "2026-01-01T12:00:01Z"}
    cluster.gang("ended", 1, attempts=[ended])
    assert cluster.answer("runs") == cluster.answer("ended") == Admission()


async def test_a_standby_grants_nothing_and_a_new_leader_looks_afresh(cluster: Cluster) -> None:
    cluster.acts = False
    cluster.gang("one")
    assert cluster.answer("one") == Admission()
    cluster.acts = True
    cluster.gate.begin()
    assert cluster.answer("one").nodes


async def test_a_job_that_does_not_ask_for_the_gate_is_told_nothing(cluster: Cluster) -> None:
    raw = a_raw_job("free")
    raw["metadata"]["uid"] = "free"
    cluster.world.jobs.apply("ADDED", cluster._next(raw))
    job = cluster.world.job("free")
    assert job is not None
    assert cluster.gate.admission(job) is None


async def test_room_is_lost_where_more_is_taken_than_there_is_or_the_node_is_shut(cluster: Cluster) -> None:
    cluster.job("one")
    for index, node in enumerate("ab"):
        cluster.sent("one", index, node)
    assert cluster.answer("one").lost == frozenset(), "what it was promised is there"
    cluster.stranger("s", "b")
    assert cluster.answer("one").lost == {"one-1"}
    cluster.node("a", ready=False)
    assert cluster.answer("one").lost == {"one-0", "one-1"}
    cluster.pod("one", 0, node="a")
    cluster.pod("one", 1, node="b")
    assert cluster.answer("one").lost == frozenset(), "they have their nodes"
