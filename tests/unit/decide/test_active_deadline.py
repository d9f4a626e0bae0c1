"""`activeDeadlineSeconds` bounds the whole run."""

from datetime import timedelta

from tests.unit.decide.world import a_running_world


def test_the_active_deadline_fails_the_job_and_stops_its_pods() -> None:
    world = a_running_world(activeDeadlineSeconds=100)
    assert world.decide().requeue_at == world.now + timedelta(seconds=100)
    world.pass_time(100).settle()
    assert world.condition("Failed")[1] == "DeadlineExceeded"
    assert all("deletionTimestamp" in pod["metadata"] for pod in world.pods.values())


def test_time_in_suspension_does_not_count_towards_the_active_deadline() -> None:
    world = a_running_world(activeDeadlineSeconds=100).edit(suspend=True).settle()
    world.end(0, 143).end(1, 143).confirm_deletions().settle().pass_time(1000).settle()
    world.edit(suspend=False).settle().run_all()
    assert world.condition("Failed")[0] == "False"
