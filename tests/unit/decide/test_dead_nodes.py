"""A pod that others miss and at whose address nothing answers is lost with its node, before Kubernetes says so."""

from typing import Any

import pytest

from disttrain_api.names import ExitCode
from disttrain_operator.decide.dead_nodes import UNNOTICED_SECONDS
from disttrain_operator.decide.decision import CreatePod, DeletePod
from disttrain_operator.decide.live import Live
from tests.builders import a_report, running
from tests.unit.decide.test_failures import OWN, verdict
from tests.unit.decide.test_lost_pods import POD, a_gang, replacements, uids
from tests.unit.decide.world import World, a_running_world


def unreachable(world: World, *indices: int, **live: Any) -> World:
    """Nothing answers at the addresses of these pods; what another one's agent says."""
    world.unreachable |= {world.pod(index)["metadata"]["uid"] for index in indices}
    speaker = next(index for index in range(3) if index not in indices)
    world.live = Live(world.pod(speaker)["metadata"]["uid"], live.pop("attempt", 1), None, **live)
    return world


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("says", ["awaited", "missing"])
def test_a_pod_that_the_others_miss_and_at_whose_address_nothing_answers_is_lost_with_its_node(
    says: str, index: int
) -> None:
    """Kubernetes has not noticed it yet."""
    world = unreachable(a_gang(), index, **{says: frozenset({index})})
    before = uids(world)
    world.settle()
    name = world.pod(index)["metadata"]["name"]
    assert [(entry.pod, entry.reason) for entry in replacements(world)] == [(name, "NodeLost")]
    status = world.job.status
    assert (status.attempt, status.restarts, status.restarts_since_checkpoint) == (1, 1, 0)
    world.confirm_deletions().settle()
    assert [new == old for new, old in zip(uids(world), before, strict=True)] == [one != index for one in range(3)]


def test_a_gang_that_is_recreated_loses_the_pod_as_well() -> None:
    world = unreachable(a_running_world(workers={"replicas": 3}), 1, missing=frozenset({1})).settle()
    found = verdict(world)
    assert (found.class_, found.pod, found.action) == ("NodeLost", POD, "RestartWithoutCounting")
    assert world.job.status.restarts_since_checkpoint == 0
    others = {name: "deletionTimestamp" in pod["metadata"] for name, pod in world.pods.items()}
    assert others == {POD.replace("-1-a1", f"-{index}-a1"): True for index in (0, 2)}, "it alone is gone already"
    world.confirm_deletions().settle()
    assert sorted(world.pods) == [POD.replace("-1-a1", f"-{index}-a2") for index in range(3)]


@pytest.mark.parametrize(("failures", "avoided"), [(2, ["node1"]), (0, [])])
@pytest.mark.parametrize("alone", [True, False])
def test_what_takes_the_place_of_the_pod_avoids_its_node(alone: bool, failures: int, avoided: list[str]) -> None:
    """Its name may be free before Kubernetes has noticed: then the scheduler takes the node for a sound one."""
    policy = {"nodeSuspicion": {"failures": failures}, "terminationTimeoutSeconds": 1}
    world = a_gang(**policy) if alone else a_running_world(workers={"replicas": 3}, runPolicy=policy)
    unreachable(world, 1, missing=frozenset({1}))
    made = list[CreatePod]()
    while not made:
        made = [one for one in world.step().actions if isinstance(one, CreatePod)]
        world.confirm_deletions()
    assert [one.index for one in made] == ([1] if alone else [0, 1, 2])
    assert {one.avoid for one in made} == {tuple(avoided)}
    assert world.settle().job.status.attempts[-1].avoided_nodes == avoided
    named = [event.message for event in world.events if event.reason == "NodeSuspected"]
    assert len(named) == (0 if alone or not avoided else 1)
    assert all("attempt 2 avoids node1: several attempts failed first there, or it was lost" in one for one in named)


def test_no_attempt_begins_beside_a_pod_that_nobody_hears() -> None:
    """Red where what is unreachable counts as gone: behind a partition it trains, and no fence keeps it from files."""
    world = unreachable(a_running_world(**OWN), 1, missing=frozenset({1})).settle()
    others = [pod["metadata"]["name"] for pod in world.pods.values() if pod["metadata"]["name"] != POD]
    for name in others:
        world.remove(name)
    world.settle()
    assert [pod["metadata"]["name"] for pod in world.pods.values()] == [POD]


GATE = {"schedulingPolicy": {"gangScheduler": "Gate"}}


@pytest.mark.parametrize(
    ("in_place", "spec", "at_once"),
    [
        (True, {}, True),
        (True, {"runPolicy": GATE}, True),
        (False, {}, True),
        (False, {"runPolicy": GATE}, False),
        (False, {"training": None, "workers": {"image": "an/image:1", "command": ["serve"]}}, False),
        (True, {"runPolicy": {"schedulingPolicy": {"gangScheduler": "Kueue", "queueName": "a-queue"}}}, False),
        (True, {"training": None, "workers": {"image": "an/image:1", "command": ["serve"]}}, False),
    ],
    ids=str,
)
def test_a_pod_on_a_dead_node_leaves_its_name_at_once_where_its_successor_is_safe_from_it(
    in_place: bool, spec: Any, at_once: bool
) -> None:
    """Red where a program of the user's own, which no fence keeps from its files, is taken for dead so early."""
    world = a_gang() if in_place else a_running_world(workers={"replicas": 3})
    uid = world.pod(1)["metadata"]["uid"]
    world.edit(**spec)
    unreachable(world, 1, missing=frozenset({1})).settle()
    assert world.job.status.restarts == 1
    assert (uid not in uids_of(world)) is at_once
    world.pass_time(5 + 59).settle()
    assert (uid not in uids_of(world)) is at_once
    world.pass_time(2).settle()
    assert uid not in uids_of(world), "terminationTimeoutSeconds are over"


def uids_of(world: World) -> set[str]:
    return {pod["metadata"]["uid"] for pod in world.pods.values()}


def test_only_the_pod_on_the_dead_node_is_forced() -> None:
    world = unreachable(a_gang(), 1, missing=frozenset({1}))
    world.step()
    (forced,) = [one for one in world.step().actions if isinstance(one, DeletePod)]
    assert (forced.name, forced.grace_seconds) == (POD, 0)
    assert forced.why == "it is recreated; node node1 is dead, and nobody would end it"
    made = [one for one in world.step().actions if isinstance(one, CreatePod)]
    assert [(one.index, one.replacement, one.dead) for one in made] == [(1, 1, ("node1",))]


def test_a_node_is_ruled_out_only_while_kubernetes_may_take_it_for_sound() -> None:
    """Later it may be the only one with room, and be back."""
    world = unreachable(a_gang(), 1, missing=frozenset({1}))
    world.step()
    world.step()
    world.pass_time(UNNOTICED_SECONDS)
    made = [one for one in world.step().actions if isinstance(one, CreatePod)]
    assert [(one.index, one.avoid, one.dead) for one in made] == [(1, ("node1",), ())]


def recreated(world: World) -> dict[int, tuple[str, ...]]:
    """The pods of the next attempt, with the nodes that they must not run on."""
    found = {}
    while not found:
        actions = world.step().actions
        found = {one.index: one.dead for one in actions if isinstance(one, CreatePod)}
        world.confirm_deletions()
    return found


def test_a_gang_that_is_recreated_keeps_off_the_node_until_kubernetes_knows() -> None:
    world = unreachable(a_running_world(workers={"replicas": 3}), 1, missing=frozenset({1}))
    assert recreated(world) == dict.fromkeys(range(3), ("node1",))
    for index in (0, 2):
        world.put(running(world.pod(index)))
    again = world.settle().decide().requeue_at
    assert again is not None
    assert UNNOTICED_SECONDS - 1 < (again - world.now).total_seconds() <= UNNOTICED_SECONDS
    waits = world.pod(1)["metadata"]["uid"]
    world.pass_time(UNNOTICED_SECONDS - 1).settle()
    assert world.pod(1)["metadata"]["uid"] == waits
    world.now = again
    (freed,) = [one for one in world.step().actions if isinstance(one, DeletePod)]
    assert (freed.uid, freed.why) == (waits, "no node is ruled out any more"), "others have a node"
    world.confirm_deletions()
    made = [one for one in world.step().actions if isinstance(one, CreatePod)]
    assert [(one.index, one.avoid, one.dead) for one in made] == [(1, ("node1",), ())]
    world.settle().pass_time(600).settle()
    assert not any(isinstance(one, DeletePod) for one in world.decide().actions), "it waits for room as any other"
    assert world.run_all().condition("Running")[:2] == ("True", "AllPodsRunning")
    assert world.job.status.attempt == 2


def test_a_gang_that_begins_after_a_pause_leaves_its_dead_pod_at_once_too() -> None:
    world = a_running_world(workers={"replicas": 3}, runPolicy={"restartBackoffSeconds": 30})
    for index in (0, 1):
        world.end(index, 137)
    recreated(world.settle())
    world.settle().run_all()
    world.unreachable.clear()
    uid = world.pod(1)["metadata"]["uid"]
    unreachable(world, 1, missing=frozenset({1}), attempt=2).settle()
    assert world.condition("Running")[:2] == ("False", "BackingOff")
    assert uid not in uids_of(world)
    world.confirm_deletions().pass_time(30)
    assert recreated(world) == dict.fromkeys(range(3), ("node1",)), "half of the time is left"


def test_a_pod_that_somebody_ends_is_left_the_time_that_it_has() -> None:
    world = unreachable(a_gang(), 1, missing=frozenset({1}))
    world.drain(1, None).settle()
    assert (replacements(world), "deletionTimestamp" in world.pod(1)["metadata"]) == ([], True)


def test_an_operator_that_did_not_see_the_silence_itself_waits() -> None:
    """The former one has written the status, and has deleted nothing."""
    world = unreachable(a_gang(), 1, missing=frozenset({1}))
    world.step(crash_after=1)
    assert replacements(world)
    world.unreachable.clear()
    world.settle()
    assert "deletionTimestamp" in world.pod(1)["metadata"]
    world.pass_time(5 + 60).settle()
    assert "deletionTimestamp" not in world.pod(1)["metadata"]


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ((1,), {}),
        ((1,), {"missing": frozenset({2})}),
        ((1,), {"missing": frozenset({1}), "attempt": 2}),
        ((1, 2), {"missing": frozenset({1, 2})}),
    ],
    ids=["nobody misses it", "another one is missed", "another attempt's agent says so", "most are unreachable"],
)
def test_a_pod_that_is_only_unreachable_to_the_operator_is_not_lost(indices: tuple[int, ...], says: Any) -> None:
    world = unreachable(a_gang(), *indices, **says).settle()
    assert world.condition("Running")[:2] == ("True", "AllPodsRunning")


def test_a_pod_that_is_missed_and_whose_address_answers_is_not_lost() -> None:
    """It may be frozen, and go on."""
    world = unreachable(a_gang(), missing=frozenset({1})).settle()
    assert world.condition("Running")[:2] == ("True", "AllPodsRunning")


@pytest.mark.parametrize(("reachable", "lost"), [(False, True), (True, False)])
def test_where_all_that_failed_have_lost_a_peer_the_one_that_is_unreachable_is_it(reachable: bool, lost: bool) -> None:
    world = a_running_world(workers={"replicas": 3})
    for index in (0, 2):
        world.end(index, ExitCode.PEER_LOST, report=a_report(5))
    if not reachable:
        world.unreachable.add(world.pod(1)["metadata"]["uid"])
    world.settle()
    assert (world.job.status.attempts[0].verdict is not None) is lost
    if lost:
        assert (verdict(world).class_, verdict(world).pod) == ("NodeLost", POD)
