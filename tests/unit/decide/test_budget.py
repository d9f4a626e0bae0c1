"""`maxRestarts` bounds restarts since the last new checkpoint, whenever the operator learns of that checkpoint."""

from typing import Any

import pytest

from disttrain_api.names import REPLACEMENT_SECONDS, Role
from disttrain_api.status import JobStatus
from disttrain_operator.decide.clock import timestamp
from tests.builders import a_claim_template, a_report
from tests.unit.decide.test_failures import COMMAND, restart, verdict
from tests.unit.decide.test_lost_pods import a_gang, delete, vanish
from tests.unit.decide.world import World, a_running_world

STORAGE = a_claim_template()


def status(world: World) -> JobStatus:
    return world.job.status


def a_job_with(max_restarts: int) -> World:
    return a_running_world(storage=STORAGE, runPolicy={"maxRestarts": max_restarts, "restartBackoffSeconds": 0})


def test_a_checkpoint_that_is_learned_while_peers_are_waited_for_renews_the_budget() -> None:
    world = a_job_with(1)
    for step in (10, 20, 30):
        world.end(0, 1, report=a_report(step, checkpoint=step)).settle()
        assert status(world).checkpoint is not None, "the status is written while the exit of the peer is waited for"
        world.end(1, 1)
        restart(world)
        assert status(world).restarts_since_checkpoint == 1
    assert world.condition("Running")[0] == "True"
    assert status(world).restarts == 3


def test_a_checkpoint_that_is_learned_after_the_verdict_is_older_than_that_restart() -> None:
    world = a_job_with(5)
    world.end(1, 137)
    restart(world).end(1, 137).settle()
    assert (status(world).attempt, status(world).restarts_since_checkpoint) == (3, 2)
    world.end(0, 1, report=a_report(10, checkpoint=10)).settle()
    assert status(world).restarts_since_checkpoint == 1
    assert [attempt.checkpoint_step for attempt in status(world).attempts] == [None, 10, None]


def test_no_job_fails_for_its_restarts_before_all_last_reports_are_known() -> None:
    world = a_job_with(1)
    world.end(1, 137)
    restart(world).end(1, 137).settle()
    assert world.condition("Failed")[0] == "False"
    assert "whether there is a new checkpoint" in world.condition("Running")[2]
    assert "deletionTimestamp" in world.pod(0)["metadata"], "who hangs in a collective reports nothing by itself"
    world.end(0, 143, report=a_report(10, checkpoint=10))
    restart(world)
    assert world.condition("Running")[0] == "True"
    assert (status(world).attempt, status(world).restarts_since_checkpoint) == (3, 1)
    assert verdict(world, 2).pod == "digits-3f9a1-worker-1-a2"


@pytest.mark.parametrize(("code", "window"), [(1, 3), (91, 90), (137, 0)])
def test_a_job_without_a_new_checkpoint_fails_with_the_first_cause_once_its_pods_have_ended(code, window):
    world = a_job_with(1)
    world.end(1, code, report=a_report(5)).settle().pass_time(window)
    restart(world).end(1, code, report=a_report(5), at=timestamp(world.now)).settle().pass_time(window).settle()
    assert world.condition("Failed")[0] == "False"
    world.end(0, 143, report=a_report(5)).settle()
    assert world.condition("Failed")[:2] == ("True", "RestartsExhausted")
    assert "digits-3f9a1-worker-1-a2" in world.condition("Failed")[2]
    assert status(world).restarts_since_checkpoint == 1


def test_where_no_restart_is_allowed_no_report_is_waited_for() -> None:
    world = a_job_with(0).end(1, 137).settle()
    assert world.condition("Failed")[:2] == ("True", "RankFailed")


def test_a_pod_that_cannot_end_does_not_hold_the_verdict_for_ever() -> None:
    world = a_job_with(1)
    world.end(1, 137)
    restart(world).end(1, 137).settle()
    world.pass_time(5 + 60).settle()
    assert world.condition("Failed")[:2] == ("True", "RestartsExhausted")


def test_a_checkpoint_before_a_suspension_renews_the_budget() -> None:
    world = a_job_with(1)
    world.end(1, 137).end(0, 1)
    restart(world).edit(suspend=True).settle()
    world.end(0, 143, report=a_report(10, checkpoint=10)).end(1, 143).confirm_deletions().settle()
    assert status(world).restarts_since_checkpoint == 0
    assert status(world).attempts[-1].checkpoint_step == 10
    world.edit(suspend=False).settle().run_all().end(1, 137)
    restart(world)
    assert (status(world).attempt, status(world).restarts_since_checkpoint) == (4, 1)


def test_the_last_attempt_of_a_job_tells_its_last_checkpoint() -> None:
    world = a_job_with(1)
    world.end(0, 0, report=a_report(100, checkpoint=100)).end(1, 0, report=a_report(100, checkpoint=100)).settle()
    assert world.condition("Complete")[0] == "True"
    assert status(world).attempts[-1].checkpoint_step == 100


def test_last_words_that_come_after_the_end_of_the_job_are_kept() -> None:
    world = a_running_world(storage=STORAGE, runPolicy={"maxRestarts": 0}).end(1, 137).settle()
    assert world.condition("Failed")[0] == "True"
    writes = world.status_writes
    world.end(0, 143, report=a_report(10, checkpoint=10)).settle()
    found = status(world).checkpoint
    assert found.step == 10
    assert world.status_writes == writes + 1


def test_a_status_of_the_version_before_goes_on() -> None:
    """It took the checkpoint over while it waited for the peers' exits, and did not renew the budget."""
    world = a_job_with(1)
    world.end(0, 1, report=a_report(10, checkpoint=10)).end(1, 1)
    restart(world).end(0, 1, report=a_report(20, checkpoint=20)).settle()
    raw: dict[str, Any] = world.raw_job["status"]
    raw["restartsSinceCheckpoint"] = 1
    world.end(1, 1)
    restart(world)
    assert (status(world).attempt, status(world).restarts_since_checkpoint) == (3, 1)


def test_pauses_of_a_single_pod_begin_anew_with_a_new_checkpoint() -> None:
    server = {"replicas": 1, "template": COMMAND}
    policy = {
        "maxRestarts": 9,
        "restartBackoffSeconds": 10,
        "failurePolicy": {"rules": [{"action": "RestartPod", "roles": ["ps"]}]},
    }
    world = a_running_world(
        training=None, workers={"template": COMMAND}, parameterServers=server, storage=STORAGE, runPolicy=policy
    )
    pauses = []
    for checkpoint in (None, None, None, 10, 10):
        report = a_report(10, checkpoint=checkpoint) if checkpoint else None
        world.end(0, 1, Role.PS, report=report).settle().confirm_deletions().settle()
        begun = world.now
        while not [pod for pod in world.pods.values() if pod["metadata"]["labels"]["disttrain.io/role"] == "ps"]:
            again = world.decide().requeue_at
            assert again is not None
            world.now = again
            world.settle()
        pauses.append((world.now - begun).total_seconds())
        world.run_all()
    assert pauses == [0, 10, 20, 0, 10]


def test_pods_and_gangs_have_budgets_of_their_own() -> None:
    """With two restarts: two pods alone, then the gang, which has as many again; then the job fails."""
    world = a_gang(maxRestarts=2, restartBackoffSeconds=0)

    def lose(*workers: int) -> tuple[int, int]:
        for index in workers:
            vanish(world, index)
            world.settle().confirm_deletions().settle().run_all()
        return world.job.status.attempt, world.job.status.restarts_since_checkpoint

    assert lose(1, 2) == (1, 0)
    assert lose(0) == (2, 1), "the pods' budget is used up"
    assert lose(1, 2) == (2, 1), "the new gang's is not"
    assert lose(0) == (3, 2)
    assert lose(1, 2) == (3, 2)
    vanish(world, 0)
    world.settle().end(1, 143).end(2, 143).settle()
    assert world.condition("Failed")[:2] == ("True", "RestartsExhausted")


def test_a_new_checkpoint_renews_the_budget_of_pods() -> None:
    world = a_gang(maxRestarts=1)
    for index, step in ((1, 10), (2, 20), (0, 30)):
        world.end(index, 137, report=a_report(step, checkpoint=step)).settle().confirm_deletions().settle().run_all()
        assert (world.job.status.attempt, world.job.status.restarts_since_checkpoint) == (1, 0)


def test_losses_that_would_use_up_the_restarts_are_one_of_the_gang() -> None:
    world = a_gang(maxRestarts=1)
    vanish(world, 1)
    vanish(world, 2)
    status = world.settle().job.status
    assert (status.attempt, status.restarts_since_checkpoint, status.attempts[0].replacements) == (2, 1, [])


def test_the_last_loss_of_a_pod_says_whether_it_counts() -> None:
    world = a_gang()
    world.end(1, 137, report=a_report(10, checkpoint=10)).settle().confirm_deletions().settle().run_all()
    world.end(0, 137, report=a_report(20, checkpoint=20)).settle().confirm_deletions().settle().run_all()
    delete(world, reason="PreemptionByScheduler")
    world.settle().pass_time(REPLACEMENT_SECONDS + 1).settle()
    assert (world.job.status.attempt, world.job.status.restarts_since_checkpoint) == (2, 0)
