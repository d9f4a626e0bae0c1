"""Pods that are made again alone: under which name, how often, and what counts."""

from datetime import timedelta
from typing import Any

import pytest

from disttrain_api.names import ExitCode, Role
from disttrain_api.report import RankFailure
from disttrain_operator.decide.clock import timestamp
from tests.builders import a_report, running, with_state
from tests.unit.decide.test_failures import COMMAND, own_world, restart, verdict
from tests.unit.decide.world import World, a_running_world

MONTH = 30 * 86_400


def test_one_pod_is_made_again_under_its_name_and_the_others_go_on() -> None:
    world = own_world({"action": "RestartPod"}).end(1, 5)
    failed = world.pod(1)["metadata"]["uid"]
    world.step(crash_after=1)
    assert world.job.status.restarts == 1, "counted before anything is deleted"
    world.settle()
    assert "deletionTimestamp" in world.pod(1)["metadata"]
    world.confirm_deletions().settle()
    assert world.pod(1)["metadata"]["uid"] != failed
    assert (world.job.status.attempt, world.job.status.restarts, len(world.pods)) == (1, 1, 3)
    assert world.condition("Running")[:2] == ("True", "ReplacingPods")
    world.put(running(world.pod(1)))
    world.settle()
    assert world.condition("Running")[1] == "AllPodsRunning"


def test_a_pod_that_vanished_without_a_trace_is_made_again_once() -> None:
    world = own_world({"action": "RestartPod"})
    world.remove(world.pod(1)["metadata"]["name"], remembered=False)
    world.settle()
    assert (len(world.pods), world.job.status.restarts) == (3, 1)


def test_a_pod_that_keeps_failing_pauses_and_uses_up_the_restarts() -> None:
    world = own_world({"action": "RestartPod"}, maxRestarts=2, restartBackoffSeconds=10)
    for number in range(2):
        world.end(1, 5).settle().confirm_deletions().settle()
        if number:
            assert world.decide().actions == ()
            world.pass_time(10).settle()
        world.run_all()
    world.end(1, 5).settle()
    assert world.condition("Failed")[:2] == ("True", "RestartsExhausted")
    assert world.job.status.restarts == 2


@pytest.mark.parametrize("reason", ["PreemptionByScheduler", "EvictionByEvictionAPI", "DeletionByPodGC"])
def test_single_pods_that_the_cluster_ends_are_made_again_however_often(reason: str) -> None:
    world = own_world({"action": "RestartPod"}, maxRestarts=0, restartBackoffSeconds=0)
    for _ in range(4):
        world.drain(1, reason).end(1, 137).settle().confirm_deletions().settle().run_all()
        assert world.condition("Running")[1] == "AllPodsRunning"
    status = world.job.status
    assert (status.attempt, status.restarts, status.restarts_since_checkpoint) == (1, 4, 0)


def test_a_checkpoint_that_a_replaced_pod_tells_of_renews_the_restarts() -> None:
    world = own_world({"action": "RestartPod"}, maxRestarts=1, restartBackoffSeconds=0)
    for step in (10, 20, 30):
        world.end(1, 5, report=a_report(step, checkpoint=step)).settle().confirm_deletions().settle().run_all()
        assert world.condition("Running")[1] == "AllPodsRunning"
        assert world.job.status.restarts_since_checkpoint == 1
    world.end(1, 5, report=a_report(30, checkpoint=30)).settle()
    assert world.condition("Failed")[:2] == ("True", "RestartsExhausted")


def test_a_single_pod_that_is_not_made_again_in_time_fails_the_job() -> None:
    world = (
        own_world({"action": "RestartPod"}, startingDeadlineSeconds=60).end(1, 5).settle().confirm_deletions().settle()
    )
    assert world.decide().requeue_at == world.now + timedelta(seconds=60)
    world.pass_time(60).settle()
    assert world.condition("Failed")[:2] == ("True", "StartingDeadlineExceeded")


def test_without_a_deadline_a_single_pod_is_waited_for() -> None:
    world = own_world({"action": "RestartPod"}).end(1, 5).settle().confirm_deletions().settle()
    world.pass_time(MONTH).settle()
    assert world.condition("Running")[:2] == ("True", "ReplacingPods")
    assert world.decide().requeue_at is None


def test_a_failure_that_concerns_all_wins_over_one_that_does_not() -> None:
    world = (
        own_world({"action": "RestartPod", "onExitCodes": {"operator": "In", "values": [5]}})
        .end(1, 5)
        .end(2, 137)
        .settle()
    )
    assert (world.job.status.attempt, verdict(world).pod) == (2, "digits-3f9a1-worker-2-a1")


SERVER = {"action": "RestartPod", "roles": ["ps"]}
EVERY_POD = {"action": "RestartPod"}


def with_a_server(*rules: dict[str, Any], **policy: Any) -> World:
    """Two workers and a parameter server that these rules make again alone."""
    return a_running_world(
        training=None,
        workers={"template": COMMAND},
        parameterServers={"replicas": 1, "template": COMMAND},
        runPolicy={"failurePolicy": {"rules": list(rules)}, "restartBackoffSeconds": 0, **policy},
    )


def leave(world: World, index: int) -> World:
    """A worker ends because the server that was made again has lost what it held."""
    text = "parameter server 0 at here:1 was started anew and has lost what it held"
    failure = RankFailure(rank=index, exit_code=91, reason="PeerLost", message=text)
    return world.end(index, ExitCode.PEER_LOST, report=a_report(5, failure=failure), at=timestamp(world.now))


def test_a_server_that_was_made_again_is_the_cause_where_workers_then_leave_and_counts_once() -> None:
    world = restart(with_a_server(SERVER).end(0, 137, Role.PS))
    assert (world.job.status.restarts, world.job.status.restarts_since_checkpoint) == (1, 1)
    leave(world.pass_time(20), 0).settle()
    assert (world.job.status.attempt, world.job.status.restarts) == (2, 2), "nothing else is waited for"
    assert world.job.status.restarts_since_checkpoint == 1
    found = verdict(world)
    assert (found.reason, found.pod, found.action) == ("PodFailed", "digits-3f9a1-ps-0-a1", "RestartWithoutCounting")
    assert found.message == (
        "pod digits-3f9a1-ps-0-a1 failed (PodFailed) and was recreated alone, after which rank 0 (pod "
        "digits-3f9a1-worker-0-a1 on node node1) exited with code 91: parameter server 0 at here:1 was started anew "
        "and has lost what it held"
    )
    assert (found.rank, found.node) == (None, None)


def test_workers_that_are_made_again_because_a_server_was_count_no_more_than_it() -> None:
    world = restart(with_a_server(EVERY_POD, maxRestarts=1).end(0, 137, Role.PS))
    restart(leave(leave(world.pass_time(2), 0), 1))
    assert world.condition("Running")[:2] == ("True", "AllPodsRunning")
    assert (world.job.status.attempt, world.job.status.restarts) == (1, 3)
    assert world.job.status.restarts_since_checkpoint == 1


def test_a_server_that_the_cluster_ended_does_not_count_by_way_of_its_workers() -> None:
    world = with_a_server(SERVER, maxRestarts=0)
    server = world.pod(0, Role.PS)
    server["status"]["conditions"] = [
        {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "no room"}
    ]
    world.end(0, 143, Role.PS)
    restart(leave(restart(world), 1))
    assert world.condition("Running")[0] == "True"
    assert (world.job.status.attempt, verdict(world).reason) == (2, "Drained")
    assert world.job.status.restarts_since_checkpoint == 0


def test_a_server_and_the_worker_that_lost_it_are_one_failure_also_where_both_are_seen_at_once() -> None:
    world = leave(with_a_server(SERVER).end(0, 137, Role.PS, reason="OOMKilled"), 0).settle()
    found = verdict(world)
    assert (found.class_, found.pod, found.action) == ("OutOfMemory", "digits-3f9a1-ps-0-a1", "RestartGang")
    assert (world.job.status.restarts, world.job.status.restarts_since_checkpoint) == (1, 1)


def test_a_server_that_waited_long_for_a_node_is_missed_all_the_same() -> None:
    """Its workers find out that it has lost what it held when it is back."""
    world = with_a_server(SERVER).end(0, 137, Role.PS).settle().confirm_deletions().settle().pass_time(MONTH).settle()
    world.put(with_state(world.pod(0, Role.PS), "Running", {"running": {"startedAt": timestamp(world.now)}}))
    leave(world.settle().pass_time(20), 0).settle()
    assert verdict(world).action == "RestartWithoutCounting"
    assert world.job.status.restarts_since_checkpoint == 1


def test_a_peer_that_is_lost_long_after_a_replacement_is_a_failure_of_its_own() -> None:
    world = restart(with_a_server(SERVER).end(0, 137, Role.PS))
    world.pass_time(3600).settle()
    leave(leave(world, 0), 1).settle().pass_time(90).settle()
    assert (verdict(world).class_, verdict(world).action) == ("PeerLost", "RestartGang")
    assert world.job.status.restarts_since_checkpoint == 2
