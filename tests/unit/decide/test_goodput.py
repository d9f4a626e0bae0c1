"""Where a job's time goes: every second has one state, whoever looks and however often."""

from dataclasses import replace
from typing import Any

import pytest

from disttrain_api.goodput import by_state, counted_until
from disttrain_api.report import RankReport
from disttrain_api.status import Goodput, GoodputState, JobStatus, Progress
from disttrain_api.times import parse_time
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import State, Transition
from disttrain_operator.decide.goodput import state_of
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.reading import observe
from disttrain_operator.news import same_meaning
from tests.builders import NOW, a_report, waiting
from tests.unit.decide.world import World, a_running_world, a_world


def goodput(world: World) -> Goodput:
    found = world.job.status.goodput
    assert found is not None
    return found


def spent(world: World) -> dict[str, int]:
    return by_state(counted_until(goodput(world), world.now))


def reports_phase(world: World, phase: str, step: int, attempt: int = 1) -> World:
    """The agent of the first worker answers, and the operator writes what it has learned."""
    report = RankReport(rank=0, step=step, total_steps=100, phase=phase)
    live = Live(world.pod()["metadata"]["uid"], attempt, report)
    observed = replace(observe(world.pods.values(), world.gone), live=live)
    status = decide(world.job, observed, world.now).status
    world.raw_job["status"] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return world


def test_every_second_of_a_job_is_counted_once() -> None:
    world = a_world()
    world.raw_job["metadata"]["creationTimestamp"] = "2026-01-01T11:59:57Z"
    world.settle().pass_time(10).run_all()
    reports_phase(world.pass_time(1), "Starting", 0)
    reports_phase(world.pass_time(20), "Training", 1)
    reports_phase(world.pass_time(100), "Evaluating", 50)
    reports_phase(world.pass_time(7), "Saving", 50)
    reports_phase(world.pass_time(5), "Training", 50)
    reports_phase(world.pass_time(30), "Training", 60)
    world.pass_time(2).end(0, 1, report=a_report(60)).end(1, 1).pass_time(4).settle()
    world.confirm_deletions().settle().pass_time(9).run_all()
    reports_phase(world.pass_time(3), "Restoring", 0, attempt=2)
    assert (world.job.status.progress.phase, world.job.status.progress.step) == ("Restoring", 60)
    reports_phase(world.pass_time(6), "Training", 50, attempt=2)
    reports_phase(world.pass_time(40), "Training", 61, attempt=2)
    world.pass_time(8).end(0, 0, report=a_report(100)).end(1, 0).settle()
    assert spent(world) == {
        "Starting": 13 + 1 + 20 + 3,
        "Training": 100 + 30 + 2 + 4 + 8,
        "Evaluating": 7,
        "Saving": 5,
        "Restarting": 9,
        "Restoring": 6,
        "Redoing": 40,
    }
    known, seconds = goodput(world), sum(spent(world).values())
    assert (known.state, known.since, known.percent) == (None, "2026-01-01T11:59:57Z", 144 * 100 // seconds)
    assert known.update_time == world.job.status.completion_time


def test_a_job_that_waits_for_room_is_queued_and_one_that_is_suspended_is_not() -> None:
    world = a_world().settle()
    for name, pod in world.pods.items():
        conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}]
        world.pods[name] = waiting(pod, "") | {"status": {"phase": "Pending", "conditions": conditions}}
    world.settle().pass_time(60).edit(suspend=True).settle().confirm_deletions().settle().pass_time(5)
    world.edit(suspend=False).settle().pass_time(2)
    assert spent(world) == {"Queued": 60, "Suspended": 5, "Starting": 2}


def test_time_alone_is_no_reason_to_write_and_the_count_goes_on_in_the_reader() -> None:
    world = a_running_world()
    before = world.job.status
    for _ in range(5):
        world.pass_time(3600)
        status = world.decide().status
        assert status == before
    assert spent(world) == {"Training": 5 * 3600}


def test_ranks_that_say_nothing_train_as_far_as_anybody_knows() -> None:
    world = a_running_world().pass_time(70).end(0, 0, report=a_report(100)).end(1, 0).settle()
    assert spent(world) == {"Training": 70}


def test_a_write_for_another_reason_takes_the_count_along() -> None:
    world = a_running_world().pass_time(30)
    world.raw_job["status"]["conditions"][0]["observedGeneration"] = 0
    world.step()
    assert (by_state(goodput(world)), goodput(world).percent) == ({"Training": 30}, 100)


def test_a_count_alone_has_no_meaning() -> None:
    status = a_running_world().job.status
    assert status.goodput is not None
    assert same_meaning(status.model_copy(update={"goodput": counted_until(status.goodput, NOW)}), status)
    assert same_meaning(status.model_copy(update={"goodput": None}), status)


def test_a_clock_that_is_set_back_takes_nothing_away() -> None:
    world = reports_phase(a_running_world(), "Training", 2).pass_time(50)
    reports_phase(world, "Training", 3)
    reports_phase(world.pass_time(-40), "Training", 4)
    assert by_state(goodput(world)) == {"Training": 50}
    reports_phase(world.pass_time(45), "Training", 5)
    assert by_state(goodput(world)) == {"Training": 55}


def test_a_job_that_was_made_in_the_future_is_counted_from_then_on() -> None:
    world = a_world()
    world.raw_job["metadata"]["creationTimestamp"] = "2026-01-01T12:00:30Z"
    world.settle().run_all()
    reports_phase(world.pass_time(50), "Training", 1)
    assert (goodput(world).since, spent(world)) == ("2026-01-01T12:00:30Z", {"Starting": 20})


def test_a_finished_job_counts_no_more() -> None:
    world = a_running_world().pass_time(10).end(0, 0).end(1, 0).settle()
    known = goodput(world)
    world.pass_time(1000).settle()
    assert (goodput(world), counted_until(known, world.now)) == (known, known)


def test_a_job_that_an_older_operator_began_is_counted_from_the_first_change_that_is_seen() -> None:
    world = a_running_world()
    del world.raw_job["status"]["goodput"]
    reports_phase(world.pass_time(100), "Training", 5)
    reports_phase(world.pass_time(10), "Training", 6)
    assert (goodput(world).since, spent(world)) == ("2026-01-01T12:01:40Z", {"Training": 10})


@pytest.mark.parametrize(
    "written", [{"updateTime": "soon"}, {"state": "Dreaming"}, {"spent": [{"state": "Training", "seconds": 2**63 - 1}]}]
)
def test_whatever_stands_there_no_number_leaves_its_bounds(written: dict[str, Any]) -> None:
    world = a_running_world()
    world.raw_job["status"]["goodput"] |= written
    reports_phase(world.pass_time(100), "Training", 5)
    reports_phase(world.pass_time(100), "Training", 6)
    known = goodput(world)
    assert all(0 <= seconds <= 10**10 for seconds in by_state(known).values())
    assert parse_time(known.update_time) == world.now
    assert known.state == "Training"


@pytest.mark.parametrize(
    ("state", "reason", "progress", "spent_on"),
    [
        (State.STARTING, "WaitingForPods", None, "Starting"),
        (State.STARTING, "ImagePullBackOff", None, "Starting"),
        (State.STARTING, "Queued", None, "Queued"),
        (State.STARTING, "WaitingForRoom", None, "Queued"),
        (State.RESTARTING, "Unschedulable", None, "Queued"),
        (State.RESTARTING, "BackingOff", None, "Waiting"),
        (State.RESTARTING, "WaitingForOldPods", None, "Restarting"),
        (State.RUNNING, "PodFailed", ("Training", 5), "Restarting"),
        (State.RUNNING, "AllPodsRunning", None, "Training"),
        (State.RUNNING, "AllPodsRunning", (None, 5), "Training"),
        (State.RUNNING, "AllPodsRunning", ("Starting", 0), "Starting"),
        (State.RUNNING, "AllPodsRunning", ("Restoring", 5), "Restoring"),
        (State.RUNNING, "AllPodsRunning", ("Training", 10), "Training"),
        (State.RUNNING, "AllPodsRunning", ("Training", 9), "Redoing"),
        (State.RUNNING, "AllPodsRunning", ("Evaluating", 9), "Evaluating"),
        (State.RUNNING, "PodLeaving", ("Saving", 10), "Saving"),
        (State.RUNNING, "AllPodsRunning", ("OfAnotherVersion", 10), "Training"),
        (State.SUSPENDING, "Suspending", ("Saving", 10), "Suspended"),
        (State.SUSPENDED, "Suspended", None, "Suspended"),
        (State.COMPLETE, "WorkersSucceeded", None, None),
        (State.FAILED, "RankFailed", None, None),
    ],
)
def test_what_a_job_spends_its_time_on(state, reason, progress, spent_on):
    known = None
    if progress is not None:
        known = Progress(step=progress[1], total_steps=100, phase=progress[0], update_time="2026-01-01T12:00:00Z")
    found = state_of(Transition(state, reason, "", JobStatus()), known, furthest=10)
    assert found == (GoodputState(spent_on) if spent_on else None)
