"""Pods that are made again alone: under which name, how often, and what counts."""

import pytest

from tests.builders import a_report, running
from tests.unit.decide.test_failures import own_world, verdict


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
    world = own_world({"action": "RestartPod"}, startDeadlineSeconds=60).end(1, 5).settle().confirm_deletions().settle()
    world.pass_time(61).settle()
    assert world.condition("Failed")[:2] == ("True", "StartDeadlineExceeded")


def test_a_failure_that_concerns_all_wins_over_one_that_does_not() -> None:
    world = own_world({"action": "RestartPod", "exitCodes": {"values": [5]}}).end(1, 5).end(2, 137).settle()
    assert (world.job.status.attempt, verdict(world).pod) == (2, "digits-3f9a1-worker-2-a1")
