"""Pods of a job that restarts in place which are lost again: what the ranks have done since counts."""

from datetime import timedelta
from typing import Any

import pytest

from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decision import CreatePod
from disttrain_operator.decide.progress import learn
from disttrain_operator.decide.reading import observe
from tests.builders import a_report
from tests.unit.decide.test_failures import verdict
from tests.unit.decide.test_lost_pods import Loss, a_gang, delete, replacements, vanish
from tests.unit.decide.world import World

HOUR = 3600


def at_step(world: World, step: int, ahead: float = 0.0) -> World:
    """The ranks have just logged this step, by a clock that is so far ahead."""
    now = timestamp(world.now + timedelta(seconds=ahead))
    progress = {"step": step, "totalSteps": 9000, "updateTime": timestamp(world.now), "lastStepTime": now}
    world.raw_job["status"]["progress"] = progress
    return world


def timed(step: int, time: str, **fields: Any) -> Any:
    """What a pod says at its end."""
    report = a_report(step)
    assert report.progress is not None
    return report.model_copy(update={"progress": report.progress.model_copy(update={"step_time": time, **fields})})


def come_back(world: World) -> World:
    return world.settle().confirm_deletions().settle().run_all().settle()


def test_without_steps_the_same_pod_is_made_again_alone_once_per_checkpoint_and_its_numbers_grow() -> None:
    world, numbers = a_gang(), []
    for step in (10, 20):
        world.end(1, 137, report=a_report(step, checkpoint=step)).settle().confirm_deletions()
        numbers += [action.replacement for action in world.decide().actions if isinstance(action, CreatePod)]
        world.settle().run_all()
        assert (world.job.status.attempt, world.job.status.restarts_since_checkpoint) == (1, 0)
    assert numbers == [1, 2]
    world.end(1, 137, report=a_report(25, checkpoint=20)).settle()
    assert world.job.status.attempt == 2
    assert verdict(world).reason == "RankFailed"


@pytest.mark.parametrize(("later", "attempt"), [(None, 2), (59, 2), (60, 1)])
@pytest.mark.parametrize("lose", [vanish, delete])
def test_it_is_made_again_alone_where_the_ranks_have_done_steps_since(
    lose: Loss, later: int | None, attempt: int
) -> None:
    """Red where they lose an hour of steps, which the others keep in memory, at the second loss before a checkpoint."""
    world = at_step(a_gang(), 400)
    lose(world)
    lost_at = world.now
    come_back(world)
    if later is not None:
        world.now = lost_at + timedelta(seconds=later)
        at_step(world, 500)
    world.now = lost_at + timedelta(seconds=HOUR)
    lose(world)
    # Before a gang ends its members have time to say why.
    world.settle().pass_time(60).settle()
    assert world.job.status.attempt == attempt


@pytest.mark.parametrize("ahead", [-600, 0, 61, 120, 600])
@pytest.mark.parametrize("backoff", [0, 10])
@pytest.mark.parametrize("lose", [vanish, delete])
def test_one_loss_is_one_whatever_the_clock_of_the_ranks(lose: Loss, backoff: int, ahead: float) -> None:
    """Red where steps of before, by a clock that is ahead, are taken for those of the new pod."""
    world = at_step(a_gang(restartBackoffSeconds=backoff), 500, ahead)
    lose(world)
    come_back(world.settle().pass_time(120))
    assert (world.job.status.attempt, len(replacements(world))) == (1, 1)


def test_the_pause_before_a_pod_is_made_again_begins_anew_with_steps() -> None:
    """Red where pods that the cluster takes now and then idle the gang for an hour at last."""
    world = a_gang(restartBackoffSeconds=300)
    for lost in range(1, 6):
        at_step(world.pass_time(HOUR), 1000 * lost)
        delete(world, reason="EvictionByEvictionAPI")
        come_back(world)
        assert (len(replacements(world)), len(world.pods), world.job.status.attempt) == (lost, 3, 1)


def test_the_last_words_of_a_former_pod_are_not_those_of_one_that_went_without_any() -> None:
    """Red where a forced deletion takes the job's progress back to where the pod was lost before."""
    world = at_step(a_gang(), 400)
    world.end(0, 137, report=timed(400, timestamp(world.now)))
    at_step(come_back(world).pass_time(70), 500)
    world.remove(world.pod(0)["metadata"]["name"])
    world.settle()
    found = world.job.status.progress
    assert found is not None
    assert (found.step, found.last_step_time) == (500, timestamp(world.now))
    assert (world.job.status.attempt, len(replacements(world))) == (1, 2)


def test_the_last_words_of_another_attempt_count_whatever_its_clock() -> None:
    """A job goes back to a checkpoint, on a node whose clock is behind that of the one before."""
    world = at_step(a_gang(), 500, ahead=600)
    come_back(world.end(0, 1).end(1, 1).end(2, 1).pass_time(5)).pass_time(60)
    report = timed(450, timestamp(world.now), skipped_steps=7)
    world.end(0, 1, report=report)
    found = learn(world.job.status, observe(world.pods.values(), world.gone), world.now).progress
    assert found is not None
    assert (found.step, found.skipped_steps) == (450, 7)
