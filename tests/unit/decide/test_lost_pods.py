"""Pods of a job that restarts in place: which are made again alone when they are lost, and when all are."""

from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest

from disttrain_api.goodput import by_state, counted_until
from disttrain_api.names import REPLACEMENT_SECONDS, ExitCode
from disttrain_api.report import RankFailure
from disttrain_api.status import Replacement
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decision import CreatePod
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.replaceable import MOST
from tests.builders import a_report, awaiting_address, running, with_state
from tests.unit.decide.test_failures import verdict
from tests.unit.decide.world import World, a_running_world, a_world

POD = "digits-3f9a1-worker-1-a1"
KILLED = RankFailure(rank=1, exit_code=137, signal=9)
IN_PLACE = {"restartStrategy": "InPlace", "restartBackoffSeconds": 0}

Loss = Callable[[World], Any]


def a_gang(replicas: int = 3, **policy: Any) -> World:
    """A job that restarts in place and runs."""
    return a_running_world(workers={"replicas": replicas}, runPolicy={**IN_PLACE, **policy})


def vanish(world: World, index: int = 1) -> None:
    world.remove(world.pod(index)["metadata"]["name"], remembered=False)


def delete(world: World, index: int = 1, reason: str | None = None) -> None:
    """Somebody deletes it, it obeys and is gone."""
    world.drain(index, reason).pass_time(1).end(index, ExitCode.STOPPED, report=a_report(5)).settle()
    world.confirm_deletions()


def replacements(world: World) -> list[Replacement]:
    return world.job.status.attempts[-1].replacements


def uids(world: World) -> list[str]:
    return [pod["metadata"]["uid"] for _, pod in sorted(world.pods.items())]


LOSSES: dict[str, tuple[Loss, str, bool]] = {
    "it is gone": (vanish, "PodLost", True),
    "somebody has deleted it": (delete, "PodLost", True),
    "it was evicted": (lambda world: delete(world, reason="EvictionByEvictionAPI"), "Drained", False),
    "it was preempted": (lambda world: delete(world, reason="PreemptionByScheduler"), "Preempted", False),
    "its node is lost": (lambda world: world.drain(1, "DeletionByPodGC"), "NodeLost", False),
    "its agent was killed": (lambda world: world.end(1, 137, report=a_report(5)), "RankFailed", True),
    "it ran out of memory": (lambda world: world.end(1, 137, reason="OOMKilled"), "OOMKilled", True),
}


@pytest.mark.parametrize("uids", [("a", "z"), ("z", "a"), ("z", "y", "a")])
def test_the_last_words_of_a_pod_that_was_made_again_alone_are_newer_than_those_of_the_former(
    uids: tuple[str, ...],
) -> None:
    """Red where the order of the uids decides, which is that of the pods that are known."""
    world = a_gang()
    for step, uid in enumerate(uids, start=5):
        world.pod(0)["metadata"]["uid"] = uid
        world.end(0, 137, report=a_report(step)).settle().confirm_deletions().settle()
        assert progress_of(world) == step
        world.pass_time(30).put(running(world.pod(0))).settle()
    for index in range(3):
        world.end(index, 0, report=a_report(9) if index == 0 else None)
    world.settle()
    assert (world.job.status.phase, progress_of(world)) == ("Succeeded", 9)


def progress_of(world: World) -> int | None:
    found = world.job.status.progress
    return None if found is None else found.step


@pytest.mark.parametrize(("lose", "reason", "counted"), LOSSES.values(), ids=LOSSES)
def test_a_lost_pod_is_made_again_alone_and_all_ranks_wait_for_it(lose: Loss, reason: str, counted: bool) -> None:
    world = a_gang()
    before = uids(world)
    lose(world)
    world.settle().confirm_deletions().settle()
    status = world.job.status
    assert (status.attempt, status.restarts, status.restarts_since_checkpoint) == (1, 1, 0)
    assert [(entry.pod, entry.reason, entry.counted) for entry in replacements(world)] == [(POD, reason, counted)]
    assert [new == old for new, old in zip(uids(world), before, strict=True)] == [True, False, True]
    assert world.condition("Running")[:2] == ("False", "ReplacingPods")
    assert world.condition("Restarting")[:2] == ("True", "ReplacingPods")
    (event,) = (event for event in world.events if event.reason == "PodRestarted")
    assert event.message.endswith("; it alone is recreated, and the ranks of all pods wait for it")
    world.pass_time(30).put(running(world.pod(1))).settle()
    assert world.condition("Running")[:2] == ("True", "AllPodsRunning")
    known = world.job.status.goodput
    assert known is not None
    assert by_state(counted_until(known, world.now))["Restarting"] == 30


def test_several_lost_pods_are_made_again_in_one_restart() -> None:
    world = a_gang(maxRestarts=2)
    vanish(world, 1)
    vanish(world, 2)
    world.settle()
    assert (world.job.status.attempt, len(replacements(world)), len(world.pods)) == (1, 2, 3)


def test_worker_0s_pod_is_made_again_as_any_other() -> None:
    world = a_gang()
    before = uids(world)
    vanish(world, 0)
    world.step()
    assert [action.replacement for action in world.decide().actions if isinstance(action, CreatePod)] == [1]
    world.settle()
    assert (world.job.status.attempt, world.job.status.restarts) == (1, 1)
    assert [new == old for new, old in zip(uids(world), before, strict=True)] == [False, True, True]
    world.put(running(world.pod(0))).settle()
    assert world.condition("Running")[:2] == ("True", "AllPodsRunning")


def test_pods_are_made_again_as_long_as_one_is_left_that_has_trained() -> None:
    world = a_gang()
    vanish(world, 0)
    world.settle()
    vanish(world, 1)
    world.settle()
    assert (world.job.status.attempt, len(replacements(world))) == (1, 2)
    for index in (0, 1):
        world.put(awaiting_address(world.pod(index), timestamp(world.now)))
    vanish(world, 2)
    world.settle()
    assert (world.job.status.attempt, len(world.job.status.attempts[0].replacements)) == (2, 2)


def test_why_a_job_restarts_is_the_lost_pod_and_not_what_ended_an_earlier_attempt() -> None:
    world = a_gang()
    world.end(0, 1, report=a_report(5)).pass_time(10)
    world.settle().confirm_deletions().settle().run_all()
    vanish(world, 2)
    world.settle()
    assert world.job.status.attempt == 2
    assert world.condition("Restarting")[:2] == ("True", "ReplacingPods")


def of_another_scheduler(world: World) -> None:
    world.edit(runPolicy={"schedulingPolicy": {"gangScheduler": "Kueue", "queueName": "a-queue"}})
    vanish(world)


def with_all_others_on_their_way_out(world: World) -> None:
    for index in (0, 2):
        world.drain(index, None)
    vanish(world)


def with_all_others_silent(world: World) -> None:
    for index in (0, 2):
        silence(world, index)
    vanish(world)


def silence(world: World, index: int) -> None:
    pod = deepcopy(world.pod(index))
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.put(pod)


def by_a_rule(world: World) -> None:
    condition = {"type": "DisruptionTarget", "reason": "EvictionByEvictionAPI"}
    rules = [{"action": "RestartGang", "onPodConditions": [condition]}]
    world.edit(runPolicy={"failurePolicy": {"rules": rules}})
    delete(world, reason="EvictionByEvictionAPI")


def beside_another_failure(world: World) -> None:
    vanish(world)
    world.end(2, 1, report=a_report(5, failure=RankFailure(rank=2, exit_code=1)))


FALLS: dict[str, tuple[Loss, dict[str, Any]]] = {
    "all": (lambda world: [vanish(world, index) for index in range(3)], {}),
    "the others, too, which somebody has deleted": (with_all_others_on_their_way_out, {}),
    "the others, too, whose nodes are silent": (with_all_others_silent, {}),
    "its agent has let no rank start again": (
        lambda world: world.end(1, 137, report=a_report(5, failure=KILLED)),
        {},
    ),
    "its program failed": (lambda world: world.end(1, 1, report=a_report(5)), {}),
    "another pod failed by itself": (beside_another_failure, {}),
    "the job does not restart in place": (vanish, {"restartStrategy": "Recreate"}),
    "Kueue keeps its name": (of_another_scheduler, {}),
    "a rule of the job says so": (by_a_rule, {}),
}


@pytest.mark.parametrize(("lose", "policy"), FALLS.values(), ids=FALLS)
def test_where_a_pod_alone_is_not_enough_the_gang_is_made_again(lose: Loss, policy: dict[str, Any]) -> None:
    world = a_gang(**policy)
    lose(world)
    world.pass_time(10).settle()
    assert world.job.status.attempt == 2
    assert not world.job.status.attempts[0].replacements


def test_a_job_of_one_pod_has_none_that_could_wait() -> None:
    world = a_gang(replicas=1)
    vanish(world, 0)
    assert world.settle().job.status.attempt == 2


def test_a_pod_that_is_lost_before_all_have_run_is_part_of_the_start() -> None:
    world = a_running_world(workers={"replicas": 3}, runPolicy=IN_PLACE)
    world.end(0, 1, report=a_report(5)).pass_time(10)
    world.settle().confirm_deletions().settle()
    assert world.job.status.attempt == 2
    vanish(world, 1)
    world.settle()
    made = [pod for pod in world.pods if pod.endswith("-worker-1-a2")]
    assert (len(made), world.job.status.restarts, replacements(world)) == (1, 1, [])


def test_a_pod_that_is_killed_before_all_have_run_ends_the_start() -> None:
    world = a_world(workers={"replicas": 3}, runPolicy=IN_PLACE).settle()
    for index in (0, 1):
        world.put(running(world.pod(index)))
    world.settle().end(1, 137).settle()
    assert (world.job.status.attempt, world.job.status.attempts[0].replacements) == (2, [])


def test_a_job_without_restarts_fails_at_a_loss_that_counts_and_replaces_what_the_cluster_ends() -> None:
    world = a_gang(maxRestarts=0)
    delete(world, reason="PreemptionByScheduler")
    world.settle().run_all()
    assert (world.job.status.attempt, len(replacements(world))) == (1, 1)
    vanish(world, 2)
    assert world.settle().condition("Failed")[:2] == ("True", "PodLost")


def test_many_lost_pods_are_a_lost_gang() -> None:
    for lost, attempt in ((MOST, 1), (MOST + 1, 2)):
        world = a_gang(replicas=MOST + 2, maxRestarts=100)
        for index in range(1, lost + 1):
            vanish(world, index)
        world.settle(rounds=100)
        assert world.job.status.attempt == attempt


@pytest.mark.parametrize(
    ("policy", "seconds"), [({}, REPLACEMENT_SECONDS), ({"startingDeadlineSeconds": 60}, 60)], ids=["always", "sooner"]
)
@pytest.mark.parametrize("place", ["it ends slowly", "no node", "waits for the others", "its name is taken"])
def test_a_pod_that_does_not_come_in_time_falls_to_the_gang(place: str, policy: dict[str, Any], seconds: int) -> None:
    world = a_gang(terminationTimeoutSeconds=3600, **policy)
    if place == "it ends slowly":
        world.end(1, 137, report=a_report(5)).settle()
    else:
        vanish(world)
        world.settle()
    if place == "no node":
        world.put(with_state(world.pod(1), "Pending", {"waiting": {"reason": "ContainerCreating"}}))
    elif place == "waits for the others":
        world.put(awaiting_address(world.pod(1), timestamp(world.now)))
    elif place == "its name is taken":
        world.drain(1, None)
    due = world.now + timedelta(seconds=seconds)
    world.pass_time(seconds - 1).settle()
    assert world.job.status.attempt == 1
    world.now = due
    world.settle()
    assert world.job.status.attempt == 2
    judged = verdict(world)
    assert (judged.pod, judged.class_, judged.action) == (POD, "NotStarted", "RestartGang")
    assert f"recreated alone, did not run within {seconds} s" in judged.message
    assert world.job.status.restarts_since_checkpoint == 1


def test_a_pod_that_the_cluster_took_and_that_does_not_come_in_time_counts_for_nobody() -> None:
    world = a_gang()
    delete(world, reason="PreemptionByScheduler")
    world.settle().pass_time(REPLACEMENT_SECONDS + 1).settle()
    assert (world.job.status.attempt, world.job.status.restarts_since_checkpoint) == (2, 0)


def test_pods_that_did_not_wait_make_the_gang_again_and_the_loss_counts_as_one_of_the_gang() -> None:
    world = a_gang()
    vanish(world)
    world.settle()
    lost = RankFailure(rank=0, exit_code=91, reason="PeerLost", message="worker 1 is lost")
    for index in (0, 2):
        world.end(index, ExitCode.PEER_LOST, report=a_report(5, failure=lost), at=timestamp(world.now))
    world.pass_time(100).settle()
    status = world.job.status
    assert (status.attempt, status.restarts, status.restarts_since_checkpoint) == (2, 2, 1)
    assert (verdict(world).pod, verdict(world).reason) == (POD, "PodLost")


def test_ranks_that_all_started_again_and_lost_a_peer_later_have_lost_another_one() -> None:
    world = a_gang()
    vanish(world)
    world.settle().put(running(world.pod(1))).settle()
    lost = RankFailure(rank=0, exit_code=91, reason="PeerLost", message="a peer is lost")
    for index in range(3):
        world.end(index, ExitCode.PEER_LOST, report=a_report(5, failure=lost), at=timestamp(world.now))
    status = world.pass_time(100).settle().job.status
    assert (status.attempt, status.restarts_since_checkpoint) == (2, 1)
    assert (verdict(world).reason, verdict(world).action) == ("PeerLost", "RestartGang")


def test_each_loss_is_an_event() -> None:
    world = a_gang()
    for index in (1, 2):
        vanish(world, index)
        world.settle()
    found = [event.message for event in world.events if event.reason == "PodRestarted"]
    assert [f"worker-{index}-a1" in message for index, message in enumerate(found, start=1)] == [True, True]


@pytest.mark.parametrize("requests", [0, 1, 2])
def test_another_operator_comes_to_the_same_end(requests: int) -> None:
    """It finds the status and the pods that are there, and knows nothing of those that are gone."""
    world = a_gang()
    before = uids(world)
    world.end(1, 137, report=a_report(5))
    world.step(crash_after=1)
    assert len(replacements(world)) == 1, "it is written before anything is deleted"
    world.step(crash_after=requests)
    world.confirm_deletions().gone.clear()
    world.step(crash_after=requests)
    world.gone.clear()
    world.settle().confirm_deletions()
    world.gone.clear()
    world.settle()
    assert (world.job.status.attempt, world.job.status.restarts, len(replacements(world))) == (1, 1, 1)
    assert [new == old for new, old in zip(uids(world), before, strict=True)] == [True, False, True]


def silent(world: World, awaited: set[int], attempt: int = 1) -> World:
    """The node of worker 1 does not report, and worker 0's agent waits for these workers."""
    silence(world, 1)
    world.live = Live(world.pod(0)["metadata"]["uid"], attempt, None, awaited=frozenset(awaited))
    return world


def test_a_pod_that_the_others_wait_for_on_a_silent_node_is_lost_with_it() -> None:
    world = silent(a_gang(), {1}).settle()
    assert [(entry.pod, entry.reason) for entry in replacements(world)] == [(POD, "NodeLost")]
    assert (world.job.status.restarts, world.job.status.restarts_since_checkpoint) == (1, 0)
    world.pass_time(3600).settle()
    assert world.job.status.attempt == 2


def test_worker_0_whose_node_is_silent_is_lost_when_another_pod_waits_for_it() -> None:
    world = a_gang()
    silence(world, 0)
    world.live = Live(world.pod(1)["metadata"]["uid"], 1, None, awaited=frozenset({0}))
    world.settle()
    assert [(entry.pod, entry.reason) for entry in replacements(world)] == [(POD.replace("-1-", "-0-"), "NodeLost")]
    assert world.job.status.attempt == 1


def test_a_pod_that_is_lost_in_two_ways_is_lost_once() -> None:
    world = silent(a_gang().drain(1, None), {1}).pass_time(3600).settle()
    assert (world.job.status.restarts, len(replacements(world))) == (1, 1)


@pytest.mark.parametrize(("awaited", "attempt"), [(set(), 1), ({2}, 1), ({1}, 2)], ids=["none", "other", "attempt"])
def test_a_silent_node_alone_is_no_loss(awaited: set[int], attempt: int) -> None:
    world = silent(a_gang(), awaited, attempt).settle()
    assert world.condition("Running")[:2] == ("True", "AllPodsRunning")


def test_a_pod_that_the_others_wait_for_and_whose_node_reports_is_not_lost() -> None:
    world = a_gang()
    world.live = Live(world.pod(0)["metadata"]["uid"], 1, None, awaited=frozenset({1}))
    assert world.settle().condition("Running")[:2] == ("True", "AllPodsRunning")
