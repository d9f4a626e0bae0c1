"""The gate's shell: what it sees, what it reserves, when it speaks."""

from disttrain_api.names import Role
from disttrain_operator import gate_cycle, gatekeeper
from disttrain_operator.decide.observed import Admission
from disttrain_operator.plan.identity import pod_labels
from tests.builders import a_raw_job
from tests.unit.operator.gated_cluster import GPU, HELD, Cluster, a_pods_metadata


async def test_a_gang_is_placed_when_all_of_its_pods_are_there(cluster: Cluster) -> None:
    cluster.job("one")
    cluster.pod("one", 0)
    assert await cluster.answer("one") == Admission()
    cluster.pod("one", 1)
    assert dict((await cluster.answer("one")).nodes) == {"one-0": "a", "one-1": "b"}
    assert cluster.woken == ["one"]


async def test_what_is_granted_is_reserved_until_the_pods_show_it(cluster: Cluster) -> None:
    cluster.gang("one", age=1)
    cluster.gang("two")
    assert (await cluster.answer("one")).nodes
    assert (await cluster.answer("two")).why.startswith("needs 2 pods x 8 nvidia.com/gpu; 0 fit")
    cluster.pod("one", 0, node="a")
    assert dict((await cluster.answer("one")).nodes) == {"one-1": "b"}
    cluster.pod("one", 1, node="b")
    assert await cluster.answer("one") == Admission()
    assert not (await cluster.answer("two")).nodes


async def test_a_released_pod_that_no_node_has_taken_yet_counts_where_it_was_sent(cluster: Cluster) -> None:
    cluster.job("one", 1, age=1)
    cluster.pod("one", 0, annotations={"disttrain.io/reserved-node": "a"})
    raw = cluster.gate.pods.get("one-0")
    assert raw is not None
    sent = {
        "metadata": {**a_pods_metadata("one", 0), "annotations": {"disttrain.io/reserved-node": "a"}},
        "spec": {"containers": [{"resources": {"requests": {GPU: "8"}}}]},
    }
    cluster.gate.pods.apply("MODIFIED", cluster.next(sent))
    cluster.gang("two", 1)
    assert dict((await cluster.answer("two")).nodes) == {"two-0": "b"}


async def test_a_grant_on_a_node_that_is_lost_is_decided_anew(cluster: Cluster) -> None:
    cluster.gang("one", 1)
    assert dict((await cluster.answer("one")).nodes) == {"one-0": "a"}
    cluster.node("a", ready=False)
    assert dict((await cluster.answer("one")).nodes) == {"one-0": "b"}


async def test_pods_of_others_count_while_they_run(cluster: Cluster) -> None:
    cluster.stranger("s", "a")
    cluster.gang("one")
    assert "1 has too little nvidia.com/gpu free" in (await cluster.answer("one")).why
    cluster.stranger("s", "a", phase="Succeeded")
    assert (await cluster.answer("one")).nodes
    assert cluster.woken == ["one", "one"]


async def test_a_gang_with_a_pod_that_is_being_deleted_waits_for_its_successor(cluster: Cluster) -> None:
    cluster.gang("one")
    cluster.pod("one", 1, deletionTimestamp="2026-01-01T12:00:00Z")
    assert await cluster.answer("one") == Admission()


async def test_gates_of_others_come_first(cluster: Cluster) -> None:
    cluster.gang("one", 1)
    raw = {
        "metadata": a_pods_metadata("one", 0),
        "spec": {"containers": [], "schedulingGates": [*HELD, {"name": "theirs"}]},
    }
    cluster.gate.pods.apply("MODIFIED", cluster.next(raw))
    assert await cluster.answer("one") == Admission(why=gate_cycle.OTHERS_HOLD)


async def test_a_reason_whose_numbers_change_all_the_time_is_written_now_and_then(cluster, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(gatekeeper.time, "monotonic", lambda: now[0])
    cluster.gang("one", 3)
    first = (await cluster.answer("one")).why
    cluster.stranger("s", "a")
    assert (await cluster.answer("one")).why == first
    assert cluster.woken == ["one"]
    now[0] += gatekeeper.SENTENCE_SECONDS
    assert (await cluster.answer("one")).why != first
    assert cluster.woken == ["one", "one"]


async def test_jobs_that_run_or_have_ended_are_no_concern(cluster: Cluster) -> None:
    ran = {"number": 1, "startTime": "2026-01-01T12:00:00Z", "runningTime": "2026-01-01T12:00:00Z"}
    cluster.gang("runs", 1, attempts=[ran])
    ended = {**ran, "endTime": "2026-01-01T12:00:01Z"}
    cluster.gang("ended", 1, attempts=[ended])
    assert await cluster.answer("runs") == await cluster.answer("ended") == Admission()


async def test_a_gang_that_the_scheduler_refused_waits_behind_those_that_came_meanwhile(cluster: Cluster) -> None:
    """Red where it keeps the place of its job."""
    verdict = {"reason": "Unschedulable", "message": "m", "class": "NotStarted", "action": "RestartWithoutCounting"}
    refused = {"number": 1, "startTime": "2026-01-01T12:00:00Z", "endTime": "2026-01-01T12:00:40Z", "verdict": verdict}
    again = {"number": 2, "startTime": "2026-01-01T12:00:50Z"}
    cluster.job("old", 2, age=20, startTime="2026-01-01T12:00:00Z", attempt=2, attempts=[refused, again])
    for index in range(2):
        labels = pod_labels("old", "old", Role.WORKER, index, 2)
        cluster.pod("old", index, labels=labels)
    cluster.gang("young")
    assert (await cluster.answer("young")).nodes
    assert (await cluster.answer("old")).why


async def test_a_standby_grants_nothing_and_a_new_leader_looks_afresh(cluster: Cluster) -> None:
    cluster.acts = False
    cluster.gang("one")
    assert await cluster.answer("one") == Admission()
    cluster.acts = True
    cluster.gate.begin()
    assert (await cluster.answer("one")).nodes


async def test_a_job_that_does_not_ask_for_the_gate_has_no_admission(cluster: Cluster) -> None:
    raw = a_raw_job("free")
    raw["metadata"]["uid"] = "free"
    cluster.world.jobs.apply("ADDED", cluster.next(raw))
    job = cluster.world.job("free")
    assert job is not None
    assert cluster.gate.admission(job) is None


async def test_room_is_lost_where_more_is_taken_than_there_is_or_the_node_is_shut(cluster: Cluster) -> None:
    cluster.job("one")
    for index, node in enumerate("ab"):
        cluster.sent("one", index, node)
    assert (await cluster.answer("one")).lost == frozenset(), "what it was promised is there"
    cluster.stranger("s", "b")
    assert (await cluster.answer("one")).lost == {"one-1"}
    cluster.node("a", ready=False)
    assert (await cluster.answer("one")).lost == {"one-0", "one-1"}
    cluster.pod("one", 0, node="a")
    cluster.pod("one", 1, node="b")
    assert (await cluster.answer("one")).lost == frozenset(), "they have their nodes"
