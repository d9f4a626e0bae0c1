"""A rank that is slow is named once and ends nothing; its node is suspected once the rank was slow three times, and not
where it is slow elsewhere, too."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from disttrain_api.report import RankFailure, RankReport, RestartsInPlace, SlowRank
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import Event
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.reading import observe
from disttrain_operator.transitions import Slowed, happenings
from tests.unit.decide.world import World, a_running_world

POD = "digits-3f9a1-worker-1-a1"
SENTENCE = (
    f"rank 1 (pod {POD} on node node1) is slow: its own work takes 412 ms per step, and 200 ms (median) that of the"
    " other ranks, which wait for it"
)
NOBODY = ("False", "NotStraggling", "no rank is known to be slow")
SUSPECTED = "several attempts failed first there, or a rank was slow"
SLOW = SlowRank(rank=1, seconds=0.412, others_seconds=0.2)
THRICE = SLOW.model_copy(update={"times": 3})


def events_of(world: World, slow: SlowRank | None, **changes: Any) -> tuple[Event, ...]:
    """The agent answers with this rank and the operator writes what it has learned; returns the Events."""
    report = RankReport(rank=0, step=5, total_steps=100, phase="Training", slow_rank=slow)
    live = replace(Live(world.pod()["metadata"]["uid"], world.job.status.attempt, report), **changes)
    return decided(world, live)


def decided(world: World, live: Live | None) -> tuple[Event, ...]:
    observed = replace(observe(world.pods.values(), world.gone, services=world.services), live=live)
    before = world.job.status
    decision = decide(world.job, observed, world.now)
    assert decision.status is not None
    assert not decision.actions
    named = [event for event in decision.events if event.reason == "RankSlow"]
    assert len(named) == list(happenings(before, decision.status)).count(Slowed())
    world.raw_job["status"] = decision.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return tuple(named)


def test_a_slow_rank_is_named_once_with_its_pod_and_node_and_the_job_runs_on() -> None:
    world = a_running_world()
    assert events_of(world, None) == ()
    assert world.condition("Straggling") == NOBODY
    assert events_of(world, SLOW) == (Event("RankSlow", SENTENCE, warning=True),)
    assert world.condition("Straggling") == ("True", "RankSlow", SENTENCE)
    assert world.job.status.attempts[0].slow_node is None
    assert (world.job.status.phase, world.job.status.attempts[0].verdict) == ("Running", None)
    status = world.job.status
    assert events_of(world, SLOW.model_copy(update={"seconds": 0.5, "times": 2})) == ()
    assert world.job.status == status, "other figures of the same rank are no news"
    assert events_of(world, THRICE) == ()
    (attempt,) = world.job.status.attempts
    assert (attempt.slow_node, attempt.slow_rank) == ("node1", 1)


def test_it_is_named_until_its_agent_says_otherwise() -> None:
    world = a_running_world()
    events_of(world, SLOW)
    for live in (None, Live(world.pod()["metadata"]["uid"], 1, None)):
        assert decided(world, live) == ()
        assert world.condition("Straggling")[2] == SENTENCE
    assert events_of(world, None) == ()
    assert world.condition("Straggling") == NOBODY
    (event,) = events_of(world, SLOW)
    assert event.message == SENTENCE


def test_another_rank_is_another_event() -> None:
    world = a_running_world(workers={"replicas": 2, "processesPerPod": 2})
    events_of(world, SLOW)
    (event,) = events_of(world, SLOW.model_copy(update={"rank": 3}))
    assert event.message.startswith(f"rank 3 (pod {POD} ")
    assert world.condition("Straggling")[2] == event.message


@pytest.mark.parametrize(
    ("rank", "changes"),
    [(1, {"attempt": 7}), (2, {}), (2**31, {})],
    ids=["of another attempt", "beyond the last rank", "far beyond"],
)
def test_what_cannot_be_names_nobody(rank: int, changes: dict[str, Any]) -> None:
    world = a_running_world()
    assert events_of(world, SLOW.model_copy(update={"rank": rank}), **changes) == ()
    assert world.condition("Straggling") == NOBODY


def test_a_rank_whose_node_is_not_known_is_named_without() -> None:
    world = a_running_world()
    del world.pod(1)["spec"]["nodeName"]
    (event,) = events_of(world, THRICE)
    assert event.message.startswith(f"rank 1 (pod {POD}) is slow: ")
    assert world.job.status.attempts[0].slow_node is None


@pytest.mark.parametrize(
    ("suspicion", "times", "avoided"),
    [
        ({}, 3, ["node1"]),
        ({}, 2, []),
        ({"stragglers": False}, 3, []),
        ({"failures": 0}, 3, ["node1"]),
        ({"stragglers": False, "failures": 1}, 3, ["node1"]),
        ({"stragglers": False, "failures": 0}, 3, []),
    ],
    ids=["three times", "twice", "not where the job says so", "slow nodes alone", "a failure", "never"],
)
def test_later_attempts_avoid_its_node(suspicion: dict[str, Any], times: int, avoided: list[str]) -> None:
    world = a_running_world(runPolicy={"nodeSuspicion": suspicion})
    events_of(world, SLOW.model_copy(update={"times": times}))
    world.end(0, 1).end(1, 1).settle()
    assert world.job.status.attempt == 2
    assert world.condition("Straggling") == NOBODY, "it is of the attempt before"
    assert world.job.status.attempts[1].avoided_nodes == avoided
    said = [event.message for event in world.events if event.reason == "NodeSuspected"]
    assert said == [f"attempt 2 avoids node1: {SUSPECTED}" for _ in avoided]


def test_a_slow_node_is_avoided_within_the_window() -> None:
    suspicion = {"windowSeconds": 60, "failures": 0}
    world = a_running_world(runPolicy={"nodeSuspicion": suspicion, "restartBackoffSeconds": 0})
    events_of(world, THRICE)
    for seconds in (1, 59, 120):
        world.pass_time(seconds).end(0, 1).end(1, 1).settle().confirm_deletions().settle().run_all()
    assert [attempt.avoided_nodes for attempt in world.job.status.attempts] == [[], ["node1"], ["node1"], []]


@pytest.mark.parametrize(("rank", "avoided"), [(1, []), (0, ["node0", "node1"])], ids=["the same rank", "another"])
def test_a_rank_that_is_slow_on_another_node_too_has_more_work_and_no_node_is_suspected(
    rank: int, avoided: list[str]
) -> None:
    world = a_running_world(runPolicy={"nodeSuspicion": {"failures": 0}, "restartBackoffSeconds": 0})
    events_of(world, THRICE)
    world.end(0, 1).end(1, 1).settle().confirm_deletions().settle().run_all()
    world.pod(rank)["spec"]["nodeName"] = "node0"
    events_of(world, THRICE.model_copy(update={"rank": rank}))
    world.end(0, 1).end(1, 1).settle()
    assert world.job.status.attempts[-1].avoided_nodes == avoided


def test_a_rank_that_is_no_longer_slow_leaves_no_suspicion() -> None:
    world = a_running_world()
    events_of(world, THRICE)
    events_of(world, None)
    assert (world.job.status.attempts[0].slow_node, world.job.status.attempts[0].slow_rank) == (None, None)
    events_of(world, THRICE)
    events_of(world, SLOW.model_copy(update={"rank": 0}))
    assert world.job.status.attempts[0].slow_node is None, "another one is"


def test_ranks_that_have_just_started_again_say_nothing_of_former_ones() -> None:
    world = a_running_world(runPolicy={"restartStrategy": "InPlace"})
    events_of(world, THRICE)
    again = RestartsInPlace(count=1, time=timestamp(world.now), failure=RankFailure(rank=0, signal=9))
    events_of(world.pass_time(60), None, restarts_in_place=again)
    assert world.job.status.attempts[0].slow_node == "node1"
    events_of(world.pass_time(3600), None, restarts_in_place=again)
    assert world.job.status.attempts[0].slow_node is None


def test_a_report_of_before_blames_no_pod_that_was_recreated_since() -> None:
    world = a_running_world(runPolicy={"restartStrategy": "InPlace"})
    entry = {"pod": POD, "uid": "former", "time": timestamp(world.now), "reason": "Drained"}
    world.raw_job["status"]["attempts"][0]["replacements"] = [entry]
    report = RankReport(rank=0, step=5, total_steps=100, phase="Training", slow_rank=THRICE)
    for ago, named in ((timedelta(seconds=5), False), (-timedelta(seconds=900), True)):
        known = report.model_copy(update={"step_time": timestamp(world.now - ago)})
        found = decided(world, Live(world.pod()["metadata"]["uid"], 1, known))
        assert bool(found) is named
        assert (world.job.status.attempts[0].slow_node is not None) is named


@pytest.mark.parametrize(("stragglers", "avoided"), [(True, ["node1"]), (False, [])])
def test_a_pod_that_is_recreated_alone_avoids_the_slow_node(stragglers: bool, avoided: list[str]) -> None:
    policy = {"restartStrategy": "InPlace", "nodeSuspicion": {"stragglers": stragglers, "failures": 0}}
    world = a_running_world(runPolicy=policy)
    events_of(world, THRICE)
    world.end(1, 137).settle()
    (attempt,) = world.job.status.attempts
    assert [entry.pod for entry in attempt.replacements] == [POD]
    assert attempt.avoided_nodes == avoided
