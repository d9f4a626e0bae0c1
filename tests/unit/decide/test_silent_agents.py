"""A pod that others miss and whose agent does not answer, though its node lives, is lost as one that was deleted."""

from copy import deepcopy
from typing import Any

import pytest

from disttrain_api.names import ExitCode
from disttrain_operator.decide.live import Live
from tests.builders import a_report
from tests.unit.decide.test_failures import verdict
from tests.unit.decide.test_lost_pods import POD, a_gang, replacements, uids
from tests.unit.decide.world import World, a_running_world

SENTENCE = (
    f"worker 1 (pod {POD} on node node1) does not answer though its node lives, and the others wait for it: its"
    " processes may be stopped, swapped out, or in a debugger"
)


def silent(world: World, *indices: int, **live: Any) -> World:
    """The agents of these pods do not answer; what another one's agent says."""
    world.silent |= {world.pod(index)["metadata"]["uid"] for index in indices}
    speaker = next(index for index in range(3) if index not in indices)
    world.live = Live(world.pod(speaker)["metadata"]["uid"], live.pop("attempt", 1), None, **live)
    return world


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("says", ["awaited", "silent"])
def test_where_ranks_restart_in_place_it_is_recreated_alone_and_counted(says: str, index: int) -> None:
    world = silent(a_gang(), index, **{says: frozenset({index})})
    before = uids(world)
    world.settle()
    name = world.pod(index)["metadata"]["name"]
    assert [(entry.pod, entry.reason) for entry in replacements(world)] == [(name, "PodSilent")]
    status = world.job.status
    assert (status.phase, status.attempt, status.restarts, status.restarts_since_checkpoint) == ("Restarting", 1, 1, 0)
    assert [pod["metadata"]["name"] for pod in world.pods.values() if "deletionTimestamp" in pod["metadata"]] == [name]
    world.confirm_deletions().settle()
    assert [new == old for new, old in zip(uids(world), before, strict=True)] == [one != index for one in range(3)]


def test_the_event_says_why() -> None:
    world = silent(a_gang(), 1, awaited=frozenset({1})).settle()
    (event,) = [event for event in world.events if event.reason == "PodRestarted"]
    assert event.message == f"{SENTENCE}; it alone is recreated, and the ranks of all pods wait for it"


def test_else_the_gang_is_recreated_and_the_verdict_says_why() -> None:
    world = silent(a_running_world(workers={"replicas": 3}), 1, silent=frozenset({1})).settle()
    found = verdict(world)
    assert (found.class_, found.reason, found.pod, found.node) == ("PodLost", "PodSilent", POD, "node1")
    assert (found.action, found.message) == ("RestartGang", SENTENCE)
    assert world.job.status.restarts_since_checkpoint == 1


def test_without_a_restart_left_the_job_fails() -> None:
    world = silent(a_gang(maxRestarts=0), 1, awaited=frozenset({1})).settle()
    world.confirm_deletions().settle()
    assert (world.job.status.phase, replacements(world)) == ("Failed", [])


def test_it_is_named_where_all_that_failed_have_lost_a_peer() -> None:
    world = a_running_world(workers={"replicas": 3})
    for index in (0, 2):
        world.end(index, ExitCode.PEER_LOST, report=a_report(5))
    silent(world, 1).pass_time(5).settle()
    assert (verdict(world).reason, verdict(world).pod) == ("PodSilent", POD)


def not_ready(world: World) -> None:
    pod = deepcopy(world.pod(1))
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.put(pod)


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ((1,), {}),
        ((1,), {"silent": frozenset({2})}),
        ((1,), {"silent": frozenset({1}), "attempt": 2}),
        ((1, 2), {"silent": frozenset({1, 2})}),
    ],
    ids=["nobody misses it", "another one is missed", "another attempt's agent says so", "most are silent"],
)
def test_a_pod_that_only_the_operator_does_not_hear_is_not_lost(indices: tuple[int, ...], says: Any) -> None:
    world = silent(a_gang(), *indices, **says).settle()
    assert world.condition("Running")[:2] == ("True", "AllPodsRunning")


def test_a_pod_whose_node_does_not_report_is_left_to_kubernetes() -> None:
    """The whole node may be stopped, and go on."""
    world = silent(a_gang(), 1, silent=frozenset({1}))
    not_ready(world)
    world.settle()
    assert (world.job.status.restarts, replacements(world)) == (0, [])


def test_a_pod_that_is_unreachable_and_one_that_is_silent_are_most_of_three() -> None:
    world = silent(a_gang(), 1, awaited=frozenset({1, 2}))
    world.unreachable.add(world.pod(2)["metadata"]["uid"])
    world.settle()
    assert (world.job.status.restarts, replacements(world)) == (0, [])
