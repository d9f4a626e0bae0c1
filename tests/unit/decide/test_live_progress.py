"""Progress of a job while it runs, as its agent says it."""

from dataclasses import replace
from typing import Any

import pytest

from disttrain_api.report import CheckpointReport, PodReport, RankFailure, RankReport, RestartsInPlace
from disttrain_api.status import Progress, TakenRequest
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.progress import duration
from disttrain_operator.decide.reading import observe
from disttrain_operator.transitions import Skipped, happenings
from tests.unit.decide.world import World, a_running_world


def a_report(step: int, **fields: Any) -> RankReport:
    return RankReport(rank=0, step=step, total_steps=100, phase="Training", remaining_seconds=5400.4, **fields)


def with_live(world: World, live: Live | None) -> World:
    """The operator decides with this answer and writes the status."""
    observed = replace(observe(world.pods.values(), world.gone), live=live)
    status = decide(world.job, observed, world.now).status
    world.raw_job["status"] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return world


def live_of(world: World, spoken: RankReport | None, **changes: Any) -> Live:
    return replace(Live(world.pod()["metadata"]["uid"], 1, spoken), **changes)


def progress(world: World) -> Progress:
    found = world.job.status.progress
    assert found is not None
    return found


def test_a_job_that_runs_says_its_step_its_loss_and_the_time_that_is_left() -> None:
    world = a_running_world()
    with_live(
        world,
        live_of(
            world, a_report(5, loss=2.0687743425369263, samples_per_second=10.0, skipped_steps=2, loading_share=0.832)
        ),
    )
    seen = progress(world)
    assert (seen.step, seen.total_steps, seen.loss, seen.samples_per_second) == (5, 100, 2.06877, 10.0)
    assert (seen.phase, seen.remaining_seconds, seen.remaining) == ("Training", 5400, "1h30m")
    assert (seen.skipped_steps, seen.loading_percent) == (2, 83)
    with_live(world, None)
    assert progress(world) == seen, "an agent that does not answer takes nothing away"


def test_each_roll_back_is_an_event_and_is_counted() -> None:
    world = a_running_world()

    def said(report: RankReport) -> tuple[list[str], list[Skipped]]:
        before = world.job.status
        observed = replace(observe(world.pods.values(), world.gone), live=live_of(world, report))
        decision = decide(world.job, observed, world.now)
        with_live(world, live_of(world, report))
        happened = [one for one in happenings(before, world.job.status) if isinstance(one, Skipped)]
        return [event.message for event in decision.events if event.reason == "RolledBack"], happened

    assert said(a_report(5)) == ([], [])
    assert said(a_report(6, skipped_steps=2)) == ([], [Skipped(2, 0)])
    ((message,), happened) = said(a_report(4, skipped_steps=3, roll_backs=1))
    assert message.startswith("roll-back 1: samples that could not be used are passed over")
    assert happened == [Skipped(1, 1)]
    assert progress(world).roll_backs == 1
    assert said(a_report(9, skipped_steps=3, roll_backs=1)) == ([], [])
    assert said(a_report(2, skipped_steps=1)) == ([], []), "ranks that begin before these steps"
    assert said(a_report(3, skipped_steps=2, roll_backs=1)) == ([], []), "nothing is counted twice"
    assert said(a_report(9, skipped_steps=2**53, roll_backs=2**53))[1] == [Skipped(10_000, 10)], "any agent's number"


def test_ranks_that_are_killed_while_they_read_a_checkpoint_take_no_step_back() -> None:
    world = a_running_world()
    with_live(world, live_of(world, a_report(40, loss=0.5)))
    restoring = a_report(0).model_copy(update={"phase": "Restoring"})
    with_live(world, live_of(world, restoring))
    assert (progress(world).step, progress(world).phase) == (40, "Restoring")
    world.end(0, 137, report=PodReport(progress=restoring)).settle()
    assert (progress(world).step, progress(world).loss) == (40, 0.5)


def test_the_time_of_the_last_step_comes_with_it_and_stays_until_another_one_is_logged() -> None:
    world = a_running_world()
    with_live(world, live_of(world, a_report(5, step_time="2026-01-01T12:00:05Z")))
    assert progress(world).last_step_time == "2026-01-01T12:00:05Z"
    before = world.job.status
    with_live(world, live_of(world, a_report(5, step_time="2026-01-01T12:00:05Z")))
    assert world.job.status == before, "no write for it alone"
    with_live(world, live_of(world, a_report(3)))
    assert (progress(world).step, progress(world).last_step_time) == (3, "2026-01-01T12:00:05Z")
    with_live(world, live_of(world, a_report(4, step_time="2026-01-01T12:00:09Z")))
    assert progress(world).last_step_time == "2026-01-01T12:00:09Z"


def test_an_answer_that_is_older_than_the_status_takes_no_step_back() -> None:
    """Another replica of the operator may have written the status since the agent answered."""
    world = a_running_world()
    late = live_of(world, a_report(5, step_time="2026-01-01T12:00:05Z"))
    with_live(world, live_of(world, a_report(40, step_time="2026-01-01T12:00:40Z")))
    before = world.job.status
    with_live(world, late)
    assert world.job.status == before
    with_live(world, live_of(world, a_report(30, step_time="2026-01-01T12:00:50Z")))
    assert progress(world).step == 30, "ranks that have rolled back"
    failed = RestartsInPlace(count=1, time="2026-01-01T12:00:55Z", failure=RankFailure(rank=1, signal=9))
    with_live(world, live_of(world, a_report(28), restarts_in_place=failed))
    with_live(world, live_of(world, a_report(60, step_time="2026-01-01T12:00:54Z")))
    assert progress(world).step == 28, "ranks of before the restart"


def test_another_workers_agent_which_knows_of_no_restart_says_where_the_ranks_are() -> None:
    world = a_running_world()
    failed = RestartsInPlace(count=1, time="2026-01-01T12:00:55Z", failure=RankFailure(rank=1, signal=9))
    with_live(world, live_of(world, a_report(28), restarts_in_place=failed))
    with_live(world, Live(world.pod(1)["metadata"]["uid"], 1, a_report(60)))
    assert progress(world).step == 60


def test_a_checkpoint_that_becomes_known_renews_the_restarts_at_once() -> None:
    world = a_running_world().end(1, 137).settle().confirm_deletions().settle().run_all()
    assert world.job.status.restarts_since_checkpoint == 1
    checkpoint = CheckpointReport(step=4, path="/checkpoints/a", time="2026-01-01T12:00:00Z")
    with_live(world, live_of(world, a_report(5, checkpoint=checkpoint), attempt=2))
    assert (world.job.status.checkpoint.step, world.job.status.restarts_since_checkpoint) == (4, 0)


def test_last_words_are_newer_than_any_answer_and_then_nothing_is_left_to_wait_for() -> None:
    world = a_running_world()
    live = live_of(world, a_report(5))
    with_live(world, live)
    world.end(0, 0, report=PodReport(progress=a_report(7)))
    with_live(world, live)
    seen = progress(world)
    assert (seen.step, seen.phase, seen.remaining_seconds, seen.remaining) == (7, None, None, None)


@pytest.mark.parametrize("changes", [{"pod_uid": "of another life"}, {"report": None}])
def test_what_no_pod_of_the_job_says_changes_nothing(changes: dict[str, Any]) -> None:
    world = a_running_world()
    with_live(world, live_of(world, a_report(5), **changes))
    assert world.job.status.progress is None


def test_the_request_that_ranks_have_taken_is_in_the_status_with_their_attempt() -> None:
    world = a_running_world()
    with_live(world, live_of(world, a_report(5), taken_request="now"))
    with_live(world, live_of(world, a_report(6)))
    assert world.job.status.checkpoint_request == TakenRequest(value="now", attempt=1)


def test_a_job_whose_pods_are_gone_shows_no_time_that_is_left() -> None:
    world = a_running_world()
    with_live(world, live_of(world, a_report(5)))
    for name in list(world.pods):
        world.remove(name, remembered=False)
    with_live(world, None)
    seen = progress(world)
    assert (seen.step, seen.phase, seen.remaining) == (5, None, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59, "59s"), (61, "1m1s"), (5400, "1h30m"), (200_000, "2d7h"), (9e15, "104166666666d16h")],
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
