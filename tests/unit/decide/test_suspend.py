"""A job that is suspended holds nothing, and one that resumes goes on."""

from disttrain_api.names import ExitCode
from tests.builders import a_report
from tests.unit.decide.world import World, a_running_world, a_world


def test_suspension_stops_all_pods_with_their_own_grace_and_resuming_is_a_new_attempt_but_no_restart() -> None:
    world = a_running_world().edit(suspend=True).settle()
    assert world.condition("Suspended")[:2] == ("False", "Suspending")
    assert world.job.status.phase == "Suspending"
    world.end(1, ExitCode.STOPPED).settle()
    assert (world.job.status.phase, world.job.status.checkpoint) == ("Suspending", None)
    world.end(0, ExitCode.STOPPED, report=a_report(40, checkpoint=40)).settle()
    assert world.condition("Suspended")[:2] == ("True", "Suspended")
    assert world.job.status.phase == "Suspended"
    world.confirm_deletions().settle()
    assert world.job.status.start_time is None
    assert world.job.status.checkpoint.step == 40
    assert world.pods == {}
    world.edit(suspend=False).settle().run_all()
    assert (world.job.status.attempt, world.job.status.restarts) == (2, 0)
    assert world.condition("Running")[0] == "True"
    assert world.condition("Suspended")[0] == "False"


def test_a_job_created_suspended_makes_no_pods() -> None:
    world = a_world(suspend=True).settle()
    assert world.pods == {}
    assert world.condition("Suspended")[0] == "True"
    assert world.job.status.attempt == 0


def begun(world: World) -> list[tuple[str, str]]:
    """The Events of attempts that were begun, other than by a restart at once."""
    reasons = ("CreatingPods", "Resumed")
    return [(event.reason, event.message) for event in world.events if event.reason in reasons]


def test_an_attempt_after_a_pause_begins_and_only_one_after_a_suspension_resumes() -> None:
    world = a_running_world(runPolicy={"restartBackoffSeconds": 10})
    for _ in range(2):
        world.end(0, 1).end(1, 1).settle().confirm_deletions().settle().pass_time(10).settle().run_all()
    assert begun(world) == [("CreatingPods", "attempt 1 begins"), ("CreatingPods", "attempt 3 begins")]
    world.edit(suspend=True).settle().confirm_deletions().settle().edit(suspend=False).settle()
    assert begun(world)[2:] == [("Resumed", "attempt 4 begins")]


def test_a_job_that_was_suspended_in_its_pause_or_from_the_begin_resumes_too() -> None:
    world = a_running_world(runPolicy={"restartBackoffSeconds": 10})
    for _ in range(2):
        world.end(0, 1).end(1, 1).settle().confirm_deletions().settle().run_all()
    assert world.condition("Running")[1] == "BackingOff"
    world.edit(suspend=True).settle().pass_time(60).edit(suspend=False).settle()
    assert begun(world)[1:] == [("Resumed", "attempt 3 begins")]
    assert begun(a_world(suspend=True).settle().edit(suspend=False).settle()) == [("Resumed", "attempt 1 begins")]
