"""A member failed or vanished: the gang restarts from its last checkpoint, or the job fails."""

import pytest

from disttrain_api.names import PERMANENT, ExitCode, exit_reason
from disttrain_api.report import RankFailure
from tests.builders import a_report
from tests.unit.decide.test_failures import COMMAND
from tests.unit.decide.world import a_running_world


def test_a_killed_rank_restarts_the_gang_once_the_old_pods_are_gone() -> None:
    world = a_running_world().end(1, 137).settle()
    assert (world.job.status.attempt, world.job.status.restarts) == (2, 1)
    assert world.condition("Running") == ("False", "WaitingForOldPods", "waiting for pods older than attempt 2 to end")
    assert {pod["metadata"]["labels"]["disttrain.io/attempt"] for pod in world.pods.values()} == {"1"}
    world.confirm_deletions().settle().run_all()
    assert {pod["metadata"]["labels"]["disttrain.io/attempt"] for pod in world.pods.values()} == {"2"}
    assert world.condition("Restarting")[0] == "False"
    verdict = world.job.status.attempts[0].verdict
    assert (verdict.reason, verdict.signal, verdict.node) == ("RankFailed", 9, "node1")


def test_an_exit_that_may_be_a_symptom_waits_for_the_exits_of_the_others() -> None:
    world = a_running_world().end(1, 1).settle()
    assert world.condition("Running")[0] == "True"
    assert world.job.status.attempt == 1
    world.pass_time(3).settle()
    assert world.job.status.attempt == 2


def test_while_it_restarts_the_job_names_the_cause() -> None:
    world = a_running_world().end(1, 3, message="line one\nValueError: bad batch\n")
    world.pass_time(3).settle()
    assert world.condition("Restarting") == (
        "True",
        "GangRestarted",
        "worker 1 (pod digits-3f9a1-worker-1-a1 on node node1) exited with code 3: ValueError (its log says more)",
    )


def test_the_first_cause_is_the_victim_not_the_peer_that_lost_it() -> None:
    symptom = a_report(50, failure=RankFailure(rank=0, exit_code=91, message="lost a peer"))
    world = a_running_world().end(0, ExitCode.PEER_LOST, report=symptom, at="2026-01-01T11:59:59Z")
    world.end(1, 137, reason="OOMKilled").settle()
    verdict = world.job.status.attempts[0].verdict
    assert verdict.reason == "OOMKilled"
    assert verdict.message == ("worker 1 (pod digits-3f9a1-worker-1-a1 on node node1) ran out of memory and was killed")


def test_restarts_without_a_new_checkpoint_are_bounded() -> None:
    world = a_running_world(runPolicy={"maxRestarts": 2, "restartBackoffSeconds": 0})
    for _ in range(2):
        world.end(0, 1).end(1, 1).settle().confirm_deletions().settle().run_all()
    world.end(0, 1).end(1, 1).settle()
    status, reason, message = world.condition("Failed")
    assert (status, reason) == ("True", "RestartsExhausted")
    assert "exited with code 1" in message
    assert "maxRestarts (2)" in message
    assert world.job.status.restarts == 2


def test_a_permanent_exit_code_of_the_trainer_fails_the_job_at_once() -> None:
    failure = RankFailure(rank=1, exit_code=81, message="training.data.config.path: /data does not exist")
    world = a_running_world().end(1, ExitCode.DATA_NOT_FOUND, report=a_report(0, failure=failure)).end(0, 91).settle()
    assert world.condition("Failed") == (
        "True",
        "DataNotFound",
        (
            "rank 1 (pod digits-3f9a1-worker-1-a1 on node node1) exited with code 81: "
            "training.data.config.path: /data does not exist"
        ),
    )


@pytest.mark.parametrize("code", sorted(PERMANENT))
def test_every_permanent_exit_code_ends_the_job_whatever_restarts_are_left(code: ExitCode) -> None:
    failure = RankFailure(rank=1, exit_code=code, message="the same wall")
    world = a_running_world(runPolicy={"maxRestarts": 9}).end(1, code, report=a_report(50, failure=failure)).settle()
    assert world.condition("Failed")[:2] == ("True", exit_reason(code))
    assert world.job.status.restarts == 0


def test_the_same_number_from_another_program_is_no_permanent_exit_code() -> None:
    world = a_running_world(training=None, workers={"template": COMMAND}).end(0, 81).end(1, 81).settle()
    assert world.condition("Failed")[0] == "False"
    assert world.job.status.attempt == 2


def test_restart_policy_never_fails_the_job_with_rank_and_exit_code() -> None:
    failure = RankFailure(rank=0, exit_code=1, message="RuntimeError: no")
    world = a_running_world(runPolicy={"restartPolicy": "Never"})
    world.end(0, 1, report=a_report(5, failure=failure)).end(1, 91).settle()
    assert world.condition("Failed") == (
        "True",
        "RankFailed",
        "rank 0 (pod digits-3f9a1-worker-0-a1 on node node1) exited with code 1: RuntimeError (its log says more)",
    )


def test_a_pod_deleted_by_force_while_the_job_runs_restarts_the_gang() -> None:
    world = a_running_world()
    world.remove(world.pod(1)["metadata"]["name"], remembered=False)
    world.settle()
    verdict = world.job.status.attempts[0].verdict
    assert (verdict.reason, verdict.pod) == ("PodLost", "digits-3f9a1-worker-1-a1")
