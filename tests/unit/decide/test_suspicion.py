"""A rank that seems to hang is named after some of the job's own steps, restarts nothing, and is withdrawn."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from disttrain_api.report import AgentStatus, RankReport, RankStatus, StepPace
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import Event, Order, RestartInPlace
from disttrain_operator.decide.live import Blame, Live, Suspicion
from disttrain_operator.decide.reading import observe
from disttrain_operator.decide.suspicion import Standstill, standstill_of, suspect
from disttrain_operator.transitions import Suspected, happenings
from tests.unit.decide.test_hang_in_place import ONCE
from tests.unit.decide.world import World, a_running_world

STOPPED = Blame(1, "is stopped by a signal, and rank 0 waits in all_reduce (c10d.py:7)", certain=True)
READS = Blame(1, "is in read (mine.py:3), and rank 0 waits in all_reduce (c10d.py:7)")
POD = "digits-3f9a1-worker-1-a1"
SENTENCE = (
    f"rank 1 (pod {POD} on node node1) {STOPPED.why}: no rank has ended a step for 4.2 s, and a step takes 0.02 s"
    " (median)"
)
NOBODY = ("False", "NotHanging", "no rank is known to hang")
FOUND = Suspicion(STOPPED, 4.2, 0.02, 0.03)
OVER = Event("NotHanging", "the ranks take steps again")


def a_rank(still: float, median: float = 1.0, longest: float = 1.0, **changes: Any) -> RankStatus:
    report = RankReport(rank=0, step=40, total_steps=100, phase="Training").model_copy(update=changes)
    pace = StepPace(still_seconds=still, median_seconds=median, longest_seconds=longest)
    return RankStatus(rank=0, report=report, pace=pace)


def standstill(*ranks: RankStatus) -> Standstill | None:
    return standstill_of(AgentStatus(job_uid="u", attempt=1, ranks=list(ranks)))


@pytest.mark.parametrize(
    ("median", "longest", "least"),
    [(1.0, 1.0, 4.0), (0.01, 0.01, 1.03), (1.0, 20.0, 31.0), (60.0, 70.0, 181.0)],
    ids=["three medians", "tiny steps", "one was long", "long steps"],
)
def test_ranks_stand_still_after_three_medians_or_a_pause_longer_than_any_and_a_second(
    median: float, longest: float, least: float
) -> None:
    usual = least - 1.0
    assert standstill(a_rank(usual - 0.01, median, longest)) is None
    assert standstill(a_rank(usual, median, longest)) == Standstill(usual, median, longest)
    assert suspect(STOPPED, STOPPED, Standstill(least - 0.01, median, longest)) is None
    assert suspect(STOPPED, STOPPED, Standstill(least, median, longest)) == Suspicion(STOPPED, least, median, longest)


def test_all_ranks_of_a_pod_stand_still_by_the_slowest_of_them_or_none_does() -> None:
    assert standstill(a_rank(90.0, 1.0, 5.0), a_rank(40.0, 9.0, 9.0)) == Standstill(40.0, 9.0, 9.0)
    assert standstill(a_rank(90.0), a_rank(1.0)) is None
    assert standstill(a_rank(90.0), a_rank(90.0, 50.0, 50.0)) is None
    assert standstill() is None


@pytest.mark.parametrize(
    "other",
    [
        a_rank(90.0, phase="Saving"),
        a_rank(90.0, phase="Evaluating"),
        a_rank(90.0, phase="Starting"),
        a_rank(90.0, step=100),
        a_rank(90.0, done=True),
        a_rank(90.0).model_copy(update={"exit_code": 1}),
        a_rank(90.0).model_copy(update={"pace": None}),
        RankStatus(rank=0),
    ],
    ids=["saves", "evaluates", "starts", "has done all", "is done", "has ended", "has no pace", "has no report"],
)
def test_ranks_do_not_stand_still_where_one_does_anything_else(other: RankStatus) -> None:
    assert standstill(a_rank(90.0)) is not None
    assert standstill(a_rank(90.0), other) is None
    assert standstill(other) is None


def test_pods_stand_still_by_the_slowest_of_them() -> None:
    assert Standstill(4.0, 1.0, 2.0) & Standstill(9.0, 0.5, 3.0) == Standstill(4.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("former", "latter", "still", "named"),
    [
        (STOPPED, STOPPED, 4.0, True),
        (STOPPED, None, 4.0, False),
        (None, STOPPED, 4.0, False),
        (STOPPED, replace(STOPPED, rank=0), 4.0, False),
        (STOPPED, replace(STOPPED, why="is in g (a.py:4)"), 4.0, False),
        (None, None, 400.0, False),
        (READS, READS, 69.9, False),
        (READS, READS, 70.0, True),
    ],
    ids=[
        "stopped", "only at first", "only at last", "another rank", "it has moved", "nobody", "slow, as yet",
        "too slow",
    ],
)  # fmt: skip
def test_a_rank_hangs_by_two_looks_that_agree_and_one_that_may_be_slow_does_later(
    former: Blame | None, latter: Blame | None, still: float, named: bool
) -> None:
    found = suspect(former, latter, Standstill(still, 1.0, 2.0))
    assert found == (Suspicion(former, still, 1.0, 2.0) if named and former is not None else None)


def answered(world: World, found: Suspicion | None, order: Order | None = None, **changes: Any) -> tuple[Event, ...]:
    """The agent's answer was looked at; returns the Events on a hang."""
    report = RankReport(rank=0, step=5, total_steps=100, phase="Training")
    live = Live(world.pod()["metadata"]["uid"], world.job.status.attempt, report, suspicion=found)
    return decided(world, replace(live, **changes), order)


def decided(world: World, live: Live | None, order: Order | None = None) -> tuple[Event, ...]:
    observed = replace(observe(world.pods.values(), world.gone, services=world.services), live=live, order=order)
    before = world.job.status
    decision = decide(world.job, observed, world.now)
    assert decision.status is not None
    named = tuple(event for event in decision.events if event.reason in ("HangSuspected", "NotHanging"))
    counted = [one.withdrawn for one in happenings(before, decision.status) if isinstance(one, Suspected)]
    assert counted == [event.reason == "NotHanging" for event in named]
    world.raw_job["status"] = decision.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return named


def test_a_rank_is_named_once_with_its_pod_and_node_and_the_job_runs_on_until_a_step_ends() -> None:
    world = a_running_world()
    assert answered(world, None) == ()
    assert world.condition("HangSuspected") == NOBODY
    assert answered(world, FOUND) == (Event("HangSuspected", SENTENCE, warning=True),)
    assert world.condition("HangSuspected") == ("True", "HangSuspected", SENTENCE)
    status = world.job.status
    assert (status.phase, status.attempts[0].verdict, status.restarts) == ("Running", None, 0)
    assert answered(world, replace(FOUND, still_seconds=60.0)) == ()
    assert world.job.status == status, "other figures of the same rank are no news"
    assert answered(world, None) == (OVER,)
    assert world.condition("HangSuspected") == NOBODY
    assert answered(world, FOUND)[0].message == SENTENCE


def test_what_is_known_holds_while_nobody_says_anything_or_a_pod_is_disturbed() -> None:
    world = a_running_world()
    answered(world, FOUND)
    assert decided(world, None) == ()
    pod = deepcopy(world.pod(1))
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.put(pod)
    assert answered(world, FOUND) == ()
    assert world.condition("HangSuspected")[2] == SENTENCE


@pytest.mark.parametrize("rank", [2, 2**31], ids=["beyond the last rank", "far beyond"])
def test_a_rank_that_no_pod_has_is_not_named(rank: int) -> None:
    world = a_running_world()
    assert answered(world, replace(FOUND, blame=replace(STOPPED, rank=rank))) == ()
    assert world.condition("HangSuspected") == NOBODY


def test_nobody_is_named_by_an_answer_of_another_attempt_or_while_a_node_is_silent() -> None:
    world = a_running_world()
    assert answered(world, FOUND, attempt=7) == ()
    pod = deepcopy(world.pod(1))
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.put(pod)
    assert answered(world, FOUND) == ()
    world.drain(0)
    assert answered(world, FOUND) == ()
    assert world.condition("HangSuspected") == NOBODY


def test_a_restart_ends_the_suspicion_and_is_no_false_alarm() -> None:
    world = a_running_world()
    answered(world, FOUND)
    world.end(0, 1).end(1, 1).settle()
    assert world.job.status.attempt == 2
    assert world.condition("HangSuspected") == NOBODY
    assert [event.reason for event in world.events if event.reason == "NotHanging"] == []


def test_ranks_that_restart_in_place_end_the_suspicion_and_are_no_false_alarm() -> None:
    world = a_running_world(runPolicy={"restartStrategy": "InPlace"})
    answered(world, FOUND)
    restarts = {"count": 1, "time": "2026-01-01T12:00:00Z", "failure": {"rank": 0}}
    report = AgentStatus.model_validate({"jobUid": "u", "attempt": 1, "restartsInPlace": restarts})
    assert answered(world, None, report=None, restarts_in_place=report.restarts_in_place) == ()
    assert world.condition("HangSuspected") == NOBODY


def test_ranks_that_are_ordered_to_restart_in_place_hang_until_they_have_and_are_no_false_alarm() -> None:
    """The first answer after the order has ranks that are killed, and no generation that has begun."""
    world = a_running_world(runPolicy={"restartStrategy": "InPlace"})
    answered(world, FOUND)
    given = Order(RestartInPlace(world.pod()["metadata"]["uid"], 1, 0, 5, 1, world.now))
    assert answered(world, None, order=given) == ()
    assert world.condition("HangSuspected") == ("True", "HangSuspected", SENTENCE)
    assert answered(world, None, order=given, restarts_in_place=ONCE) == ()
    assert world.condition("HangSuspected") == NOBODY


def test_ranks_that_go_on_before_an_order_are_not_suspected_any_more() -> None:
    world = a_running_world(runPolicy={"restartStrategy": "InPlace"})
    answered(world, FOUND)
    given = Order(RestartInPlace(world.pod()["metadata"]["uid"], 1, 0, 5, 1, world.now), refused="a step was done")
    assert answered(world, None, order=given) == (OVER,)
