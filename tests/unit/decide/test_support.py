"""What a gang needs besides its pods is made again while it is needed, and asked for without a storm of requests."""

from typing import Any

import pytest

from disttrain_operator.decide.decision import CreateSupport
from disttrain_operator.decide.observed import CreateProblem
from tests.builders import a_claim_template, running
from tests.unit.decide.test_failures import own_world
from tests.unit.decide.test_queues import a_queued_world
from tests.unit.decide.world import World, a_running_world, a_world

VOLCANO = {"runPolicy": {"schedulingPolicy": {"gangScheduler": "Volcano"}}}


def asked(world: World) -> list[CreateSupport]:
    """What is asked for now."""
    return [action for action in world.decide().actions if isinstance(action, CreateSupport)]


def placed(world: World, after: float = 0) -> World:
    """All pods get a node after so many seconds, and do not start."""
    world.pass_time(after)
    for pod in list(world.pods.values()):
        at = world.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at}
        world.put({**pod, "spec": {"nodeName": "node1"}, "status": {"phase": "Pending", "conditions": [condition]}})
    return world


def unplaced(world: World, message: str = "0/3 nodes are available") -> World:
    for pod in list(world.pods.values()):
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        world.put({**pod, "status": {"phase": "Pending", "conditions": [condition]}})
    return world


@pytest.mark.parametrize("begun", [a_world, a_running_world])
def test_a_service_that_is_gone_is_made_again_while_the_attempt_is_under_way(begun: Any) -> None:
    world = begun().settle()
    world.services.clear()
    (action,) = asked(world)
    assert (action.attempt, action.why) == (1, "its Service is missing")
    world.settle()
    assert world.services == {"digits-3f9a1"}


@pytest.mark.parametrize("change", [{"suspend": True}, None])
def test_the_service_of_a_job_that_has_no_attempt_is_nobodys_need(change: dict[str, Any] | None) -> None:
    world = a_running_world()
    if change is not None:
        world.edit(**change)
    else:
        world.end(0, 0).end(1, 0)
    world.settle().confirm_deletions().settle()
    world.services.clear()
    assert asked(world) == []


def test_a_running_gang_whose_service_cannot_be_made_again_says_so_and_goes_on() -> None:
    world = a_running_world()
    message = "an object that is not the job's holds the name; it has no controller"
    world.problems = [CreateProblem("Service", "digits-3f9a1", 409, "NameConflict", message)]
    world.settle()
    text = f"Service digits-3f9a1: {message}; delete the foreign object or give the job another name"
    assert world.condition("Running") == ("True", "NameConflict", text)
    world.problems = []
    assert world.settle().condition("Running")[1] == "AllPodsRunning"


def test_what_pods_may_lack_that_have_a_node_and_do_not_start_is_asked_for_again_ever_less_often() -> None:
    world = placed(a_world(runPolicy={"startingDeadlineSeconds": 3600}).settle(), after=1000)
    begun, tried = world.now, []
    while (world.now - begun).total_seconds() < 1500:
        again = world.decide().requeue_at
        assert again is not None
        world.now = again
        if asked(world):
            tried.append((world.now - begun).total_seconds())
        world.step()
        assert asked(world) == [], "once for each try"
    assert tried == [30, 60, 120, 240, 480, 780, 1080, 1380, 1680]


def test_a_time_of_long_ago_that_anybody_may_have_written_costs_nothing_to_reckon_with() -> None:
    world = placed(a_world().settle())
    for pod in world.pods.values():
        pod["status"]["conditions"][0]["lastTransitionTime"] = "1970-01-01T00:00:00Z"
    (action,) = asked(world)
    assert action.tries > 5_000_000
    again = world.decide().requeue_at
    assert again is not None
    assert 0 < (again - world.now).total_seconds() <= 300


def test_another_process_asks_once_and_goes_on_where_the_first_was() -> None:
    world = placed(a_world().settle()).pass_time(130).settle()
    before = world.supports.pop()
    world.supports.clear()
    assert asked(world) == [before]
    world.settle().pass_time(60).settle()
    assert world.supports == [before]


def test_a_gang_whose_pods_start_is_asked_for_nothing_more() -> None:
    world = placed(a_world().settle())
    for index in (0, 1):
        world.put(running(world.pod(index)))
    world.settle().pass_time(100_000).settle()
    assert len(world.supports) == 1


def test_a_single_pod_that_is_made_again_and_does_not_start_may_lack_something_too() -> None:
    world = own_world({"action": "RestartPod"}).end(1, 5).settle().confirm_deletions().settle()
    world.put({**world.pod(1), "spec": {"nodeName": "node2"}})
    world.pass_time(31)
    assert [action.tries for action in asked(world)] == [1]


@pytest.mark.parametrize(("spec", "is_asked"), [({}, False), ({"storage": a_claim_template()}, True), (VOLCANO, True)])
def test_pods_without_a_node_may_lack_a_claim_or_a_pod_group_alone(spec: dict[str, Any], is_asked: bool) -> None:
    world = unplaced(a_world(**spec).settle()).pass_time(31)
    assert bool(asked(world)) is is_asked


def test_pods_in_a_queue_lack_nothing() -> None:
    world = a_queued_world(storage=a_claim_template()).pass_time(10_000)
    assert asked(world) == []
    assert world.condition("Running")[1] == "Queued"
