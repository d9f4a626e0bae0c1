"""What cannot be read or placed, or is nobody's, costs itself; and the loop goes on during a cycle of the gate."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from disttrain_api.names import Role
from disttrain_api.ownership import owner_reference
from disttrain_operator import gate_cycle, gatekeeper
from disttrain_operator.decide.observed import Admission, Job
from disttrain_operator.gate import read
from disttrain_operator.gate.fit import Needs
from disttrain_operator.gate_cycle import ClusterSnapshot, GateDecision
from disttrain_operator.plan.identity import pod_labels
from tests.unit.operator.gated_cluster import GPU, HELD, Cluster, a_pods_metadata
from tests.waiting import GENEROUS

RESERVED = "disttrain.io/reserved-node"


def a_pod(metadata: dict[str, Any], gpus: int = 100_000, **spec: Any) -> dict[str, Any]:
    """A pod of no node."""
    requests = {"resources": {"requests": {GPU: str(gpus), "cpu": "100000"}}}
    return {"metadata": metadata, "spec": {"containers": [requests], **spec}, "status": {"phase": "Pending"}}


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"labels": pod_labels("one", "one", Role.WORKER, 0, 1)},
        {"labels": pod_labels("one", "one", Role.WORKER, 0, 1), "ownerReferences": [owner_reference("one", "one")]},
        {"labels": pod_labels("x", "x", Role.WORKER, 0, 1), "ownerReferences": [owner_reference("x", "x")]},
    ],
    ids=["annotation", "labels", "reference from another namespace", "reference to no job"],
)
async def test_a_pod_of_nobodys_takes_nothing_of_the_node_that_it_names(cluster, metadata):
    """Red where an owner in another namespace counts, and where anybody's annotation reserves a node."""
    cluster.gang("one")
    forged = {"name": "forged", "uid": "forged", "namespace": "evil", "annotations": {RESERVED: "a"}}
    cluster.gate.pods.apply("ADDED", cluster.next(a_pod({**forged, **metadata}, 8)))
    cluster.gate.pods.apply("ADDED", cluster.next(a_pod({**forged, **metadata, "uid": "more"})))
    assert dict((await cluster.answer("one")).nodes) == {"one-0": "a", "one-1": "b"}


async def test_pods_that_a_tenant_adds_to_its_own_gang_take_nothing(cluster: Cluster) -> None:
    """The pods are another attempt's, no rank's of the job, or ask for more than their node has."""
    cluster.job("mine", 1)
    one, labels = a_pods_metadata("mine", 0), a_pods_metadata("mine", 0)["labels"]
    for number, (metadata, gpus) in enumerate(
        (
            ({**one, "labels": {**labels, "disttrain.io/attempt": "7"}}, 8),
            ({**one, "labels": {**labels, "disttrain.io/index": "7"}}, 8),
            ({**one, "labels": {**labels, "disttrain.io/role": "ps"}}, 8),
            (one, 100_000),
        )
    ):
        forged = {**metadata, "uid": f"forged-{number}", "annotations": {RESERVED: "a"}}
        cluster.gate.pods.apply("ADDED", cluster.next(a_pod(forged, gpus)))
    cluster.gang("one")
    assert dict((await cluster.answer("one")).nodes) == {"one-0": "a", "one-1": "b"}


async def test_a_job_that_cannot_be_read_costs_itself_and_is_named_once(cluster, monkeypatch, caplog):
    """Red where its error ends the cycle for all jobs."""
    cluster.gang("odd", age=5)
    cluster.gang("one")
    read_job = cluster.world.job

    def job(uid: str) -> Job | None:
        if uid == "odd":
            raise RecursionError("nested too deep")
        return read_job(uid)

    monkeypatch.setattr(cluster.world, "job", job)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert (await cluster.answer("one")).nodes
    assert [record.getMessage() for record in caplog.records] == [
        "default/odd: it cannot be read (RecursionError: nested too deep); its gang waits, others do not"
    ]


async def test_a_job_that_cannot_be_read_after_the_cycle_delays_no_other(cluster, monkeypatch, caplog):
    cluster.gang("odd", 1, age=5)
    cluster.gang("one", 1)
    read_job, reads = cluster.world.job, list[str]()

    def job(uid: str) -> Job | None:
        reads.append(uid)
        if uid == "odd" and reads.count("odd") == 2:
            raise RecursionError("nested too deep")
        return read_job(uid)

    monkeypatch.setattr(cluster.world, "job", job)
    assert dict((await cluster.answer("one")).nodes) == {"one-0": "b"}
    assert "it cannot be read (RecursionError: nested too deep)" in caplog.text


async def test_a_gate_that_is_closed_runs_no_more_cycles(cluster: Cluster) -> None:
    """A timer that rang while the loop ends would leave a cycle behind that nobody awaits."""
    cluster.gang("one")
    await cluster.gate.close()
    cluster.node("a", gpus=4)
    assert cluster.gate._timer is None
    cluster.gate.begin()
    assert (cluster.gate._timer, cluster.gate._cycle) == (None, None)


async def test_a_gang_that_cannot_be_placed_delays_no_other(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.gang("odd", age=5)
    cluster.gang("one")
    raw = cluster.gate.pods.get("odd-1")
    raw["pod"] = replace(raw["pod"], needs=Needs(requests=((GPU, "eight"),)))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert dict((await cluster.answer("one")).nodes) == {"one-0": "a", "one-1": "b"}
    assert (await cluster.answer("odd")).why.startswith("the gate has failed to look for room for it (TypeError: ")
    assert len(caplog.records) == 1
    assert "default/odd" in caplog.records[0].getMessage()


async def test_an_error_about_one_gang_delays_no_other_and_is_its_reason(cluster: Cluster) -> None:
    cluster.gang("odd", age=5)
    cluster.gang("one")
    raw = cluster.gate.pods.get("odd-1")
    raw["pod"] = replace(raw["pod"], identity=["worker", 1])
    assert dict((await cluster.answer("one")).nodes) == {"one-0": "a", "one-1": "b"}
    assert (await cluster.answer("odd")).why.startswith("the gate has failed to look at it (TypeError: ")


async def test_a_pod_with_more_constraints_than_are_read_is_refused_with_the_reason(cluster: Cluster) -> None:
    values = [f"v{number}" for number in range(read.MAX_CONSTRAINTS)]
    line = {"key": "zone", "operator": "NotIn", "values": values}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [line]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    cluster.job("wide", 1, age=5)
    raw = a_pod(a_pods_metadata("wide", 0), 8, schedulingGates=HELD, affinity=affinity)
    cluster.gate.pods.apply("ADDED", cluster.next(raw))
    cluster.gang("one")
    assert (await cluster.answer("one")).nodes
    assert (await cluster.answer("wide")).why == (
        "its node affinity, nodeSelector, tolerations and requests have 505 entries; the gate reads 500 at most"
    )


@pytest.mark.parametrize("invented", ["a.io/{}", "hugepages-{}Ki"])
async def test_resources_that_nobody_has_do_not_hide_what_a_pod_takes(cluster: Cluster, invented: str) -> None:
    """It went around the scheduler; the kubelet takes no notice of resources that its node does not have. Red where
    resources are kept by their names alone."""
    names = [invented.format(number) for number in range(1000, 1000 + 3 * read.MAX_RESOURCES)]
    requests = dict.fromkeys(names, "1") | {GPU: "8", "cpu": "7", "memory": "1Gi"}
    raw = {
        "metadata": {"name": "greedy", "namespace": "other", "uid": "greedy"},
        "spec": {"nodeName": "a", "containers": [{"resources": {"requests": requests}}]},
        "status": {"phase": "Running"},
    }
    cluster.gate.pods.apply("ADDED", cluster.next(raw))
    kept = cluster.gate.pods.get("greedy")
    taken = dict(kept["pod"].requests)
    assert len(taken) == read.MAX_RESOURCES
    assert (taken[GPU], taken["cpu"], taken["memory"], taken["pods"]) == (8, 7000, 2**30, 1)
    cluster.gang("one")
    assert "a" not in dict((await cluster.answer("one")).nodes).values()


async def test_a_node_whose_resources_change_for_ever_fills_no_memory(cluster: Cluster) -> None:
    for number in range(30):
        offered = {f"a.io/{number}-{name}": "1" for name in range(100)}
        raw = {"metadata": {"name": "odd", "uid": "odd"}, "status": {"allocatable": offered}}
        cluster.gate.nodes.apply("MODIFIED" if number else "ADDED", cluster.next(raw))
    assert GPU in cluster.gate._offered
    assert len(cluster.gate._offered) == gatekeeper.MAX_OFFERED


@pytest.mark.parametrize("odd", [7, "text", [7], [None], {"a": 7}, [{"name": 7}], [{"resources": 7}], [[]]])
@pytest.mark.parametrize(
    "field", ["schedulingGates", "containers", "initContainers", "affinity", "nodeSelector", "tolerations", "overhead"]
)
def test_a_pod_of_any_shape_is_read(field: str, odd: Any) -> None:
    """The API server lets few of these in. One that got in otherwise must not end the watch."""
    spec = {"containers": [], "nodeName": "a", field: odd}
    facts = read.cluster_pod({"metadata": {"uid": "u", "namespace": "n"}, "spec": spec})
    assert (facts.uid, facts.namespace, facts.node) == ("u", "n", "a")


def test_a_node_of_any_shape_is_read() -> None:
    for odd in (7, "text", [7], {"cpu": "much"}):
        facts = read.node_facts({"metadata": {"name": "a"}, "status": {"allocatable": odd}})
        assert not facts.ready


async def test_thousands_of_gangs_are_not_all_looked_at(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_cycle, "MAX_GANGS_OF_A_NAMESPACE", 3)
    for number in range(5):
        cluster.gang(f"huge-{number}", 3, age=20 - number)
    raw = cluster.world.jobs.get("huge-4")
    assert raw is not None
    cluster.gang("other", 2)
    other = cluster.world.jobs.get("other")
    other["metadata"]["namespace"] = "elsewhere"
    for index in range(2):
        pod = cluster.gate.pods.get(f"other-{index}")
        pod["pod"] = replace(pod["pod"], namespace="elsewhere")
    assert (await cluster.answer("huge-2")).why.startswith("needs 3 pods")
    assert (await cluster.answer("huge-3")).why == (await cluster.answer("huge-4")).why == gate_cycle.BEHIND_ITS_OWN
    assert (await cluster.answer("other")).nodes


async def test_a_gang_behind_others_has_the_end_of_the_period_in_its_reason(cluster: Cluster) -> None:
    """The first of the turns, which are 4 hours at most."""
    cluster.job("runs", 1, attempts=[{"number": 1, "startTime": "2026-01-01T12:00:00Z"}], age=9)
    cluster.pod("runs", 0, node="a")
    cluster.gang("large", 2, age=5)
    cluster.gang("small", 1)
    assert (await cluster.answer("small")).why == (
        "waits behind gangs that came first and need the same nodes; they keep them until 2026-01-01T12:15:00Z at most"
    )
    cluster.now += timedelta(minutes=15)
    assert dict((await cluster.answer("small")).nodes) == {"small-0": "b"}


class SlowCycle:
    """A cycle that goes on until it is allowed to end."""

    def __init__(self, decide_gangs: Callable[[ClusterSnapshot], GateDecision]) -> None:
        self._decide_gangs = decide_gangs
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, snapshot: ClusterSnapshot) -> GateDecision:
        found = self._decide_gangs(snapshot)
        self.begun.set()
        assert self.may_end.wait(GENEROUS)
        return found


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowCycle:
    run_cycle = SlowCycle(gatekeeper.decide_gangs)
    monkeypatch.setattr(gatekeeper, "decide_gangs", run_cycle)
    return run_cycle


async def begun(cluster: Cluster, slow: SlowCycle) -> asyncio.Task[float]:
    """Starts a cycle; returns when it has decided, before it ends."""
    cycle = asyncio.create_task(cluster.gate.run_cycle())
    async with asyncio.timeout(GENEROUS):
        while not slow.begun.is_set():  # noqa: ASYNC110 - the event is another thread's
            await asyncio.sleep(0.001)
    return cycle


def known(cluster: Cluster, name: str) -> Admission:
    """The gate's answer now, without another cycle."""
    job = cluster.world.job(name)
    assert job is not None
    found = cluster.gate.admission(job)
    assert found is not None
    return found


async def test_the_loop_goes_on_during_a_cycle(cluster: Cluster, slow: SlowCycle) -> None:
    cluster.gang("one")
    cycle = await begun(cluster, slow)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not cycle.done()
    slow.may_end.set()
    await cycle
    assert cluster.woken == ["one"]


@pytest.mark.parametrize("what", ["pod", "node", "job"])
async def test_what_has_changed_during_a_cycle_is_decided_again(cluster: Cluster, slow: SlowCycle, what: str) -> None:
    cluster.gang("one")
    cluster.gang("two", 1)
    cycle = await begun(cluster, slow)
    match what:
        case "pod":
            raw = cluster.gate.pods.get("one-1")
            assert raw is not None
            cluster.gate.pods.apply("DELETED", cluster.next({"metadata": {"uid": "one-1", "name": "one-1"}}))
        case "node":
            cluster.node("b", ready=False)
        case "job":
            ended = {"number": 1, "startTime": "2026-01-01T12:00:00Z", "endTime": "2026-01-01T12:00:01Z"}
            cluster.job("one", attempts=[ended])
    slow.may_end.set()
    await cycle
    assert not known(cluster, "one").nodes, "it was granted what is no more"
    assert not (await cluster.answer("one")).nodes


async def test_what_was_granted_before_stays_whatever_changes_during_a_cycle(cluster: Cluster, slow: SlowCycle) -> None:
    """Its pods may be on their way there."""
    cluster.gang("one")
    slow.may_end.set()
    assert (await cluster.answer("one")).nodes
    slow.begun.clear()
    slow.may_end.clear()
    cycle = await begun(cluster, slow)
    cluster.job("one")
    cluster.pod("one", 0, node="a")
    slow.may_end.set()
    await cycle
    assert ("one-1", "b") in known(cluster, "one").nodes
    assert dict((await cluster.answer("one")).nodes) == {"one-1": "b"}


async def test_a_cycle_that_began_before_this_replica_acted_grants_nothing(cluster: Cluster, slow: SlowCycle) -> None:
    cluster.gang("one")
    cycle = await begun(cluster, slow)
    cluster.gate.begin()
    slow.may_end.set()
    await cycle
    assert not known(cluster, "one").nodes
    assert (await cluster.answer("one")).nodes


async def test_one_cycle_at_a_time(cluster: Cluster, slow: SlowCycle) -> None:
    cluster.gang("one")
    cycle = await begun(cluster, slow)
    slow.begun.clear()
    second = asyncio.create_task(cluster.gate.run_cycle())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not slow.begun.is_set()
    slow.may_end.set()
    await asyncio.gather(cycle, second)
    assert slow.begun.is_set()


async def test_many_jobs_are_read_in_many_turns_of_the_loop(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the spec of a job that is new takes a millisecond; after a start all are new."""
    monkeypatch.setattr(gatekeeper, "READING_SECONDS", -1.0)
    for number in range(20):
        cluster.gang(f"job-{number}", 1)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await cluster.gate.run_cycle()
    counting.cancel()
    assert turns >= 20
