"""A failure that comes again, exactly and without progress, ends the job: a third life would meet it, too."""

from typing import Any

import pytest

from disttrain_api.names import ExitCode
from disttrain_api.report import FailureSignature, PodReport, RankFailure
from disttrain_api.status import Signature
from disttrain_operator.decide.clock import timestamp
from tests.builders import a_claim_template, a_report, ended
from tests.unit.decide.test_failures import restart, verdict
from tests.unit.decide.world import World, a_running_world

TYPO: dict[str, Any] = {"error": "NameError", "place": "/app/model.py:12", "step": 0, "steps_done": 0}


def failed(code: int = 1, checkpoint: int | None = None, **signature: Any) -> PodReport:
    """What the agent says of a rank that raised."""
    found = FailureSignature(**{**TYPO, **signature})
    failure = RankFailure(rank=1, exit_code=code, message="NameError: name 'lr' is not defined", signature=found)
    return a_report(0, checkpoint=checkpoint, failure=failure)


def a_job(**policy: Any) -> World:
    return a_running_world(storage=a_claim_template(), runPolicy={"restartBackoffSeconds": 0, **policy})


def end(world: World, report: PodReport, code: int = 1) -> World:
    """Rank 1 raises and its peer loses it."""
    world.end(1, code, report=report).end(0, ExitCode.PEER_LOST, report=a_report(0))
    return world.settle()


def test_the_second_of_two_equal_failures_without_progress_ends_the_job_with_its_reason() -> None:
    world = restart(end(a_job(), failed()))
    assert world.condition("Running")[0] == "True"
    end(world, failed())
    assert world.condition("Failed") == (
        "True",
        "RankFailed",
        (
            "rank 1 (pod digits-3f9a1-worker-1-a2 on node node1) exited with code 1: "
            "NameError at /app/model.py:12 (its log says more); attempt 1 ended with the same failure "
            "(NameError at /app/model.py:12), and no step was done between them: another restart would end the same way"
        ),
    )
    assert (verdict(world, 2).action, world.job.status.restarts) == ("FailJob", 1)
    assert verdict(world).signature == Signature(**TYPO), "a next leader knows it from the status"


def test_a_loss_that_is_not_finite_in_the_same_step_ends_the_job() -> None:
    report = failed(92, error="NonFiniteLoss", step=7, steps_done=7)
    world = end(restart(end(a_job(), report, 92)), report, 92)
    assert world.condition("Failed")[:2] == ("True", "NonFiniteLoss")


@pytest.mark.parametrize(
    "change",
    [
        {"error": "TypeError"},
        {"place": "/app/model.py:13"},
        {"step": 1},
        {"checkpoint": 10},
        {"step": None, "steps_done": 4},
    ],
)
def test_another_failure_or_progress_between_two_is_no_repetition(change: dict[str, Any]) -> None:
    former = failed(**{key: value for key, value in change.items() if change.get("step", 0) is None})
    world = restart(end(restart(end(a_job(), former)), failed(**change)))
    assert world.condition("Running")[0] == "True"


@pytest.mark.parametrize(("second_node", "status"), [("node1", "False"), ("node2", "True")])
def test_an_error_of_a_device_is_compared_on_another_node_only(second_node: str, status: str) -> None:
    """A broken GPU fails at the same place every time, and the gang may leave its node."""
    report = failed(error="torch.AcceleratorError")
    world = restart(end(a_job(nodeSuspicion={"failures": 2}), report))
    pod = ended(world.pod(1), 1, report=report, at=timestamp(world.now))
    pod["spec"]["nodeName"] = second_node
    world.put(pod)
    world.end(0, ExitCode.PEER_LOST, report=a_report(0)).settle()
    assert world.condition("Failed")[0] == status


def test_what_the_cluster_does_in_between_changes_nothing() -> None:
    world = restart(end(a_job(), failed()))
    world.drain(1).end(1, 143).end(0, 143)
    restart(world)
    assert verdict(world, 2).class_ == "Disruption"
    end(world, failed())
    assert world.condition("Failed")[0] == "True"
    assert "attempt 1 ended with the same failure" in world.condition("Failed")[2]


def test_failures_without_a_signature_are_not_compared() -> None:
    world = a_job()
    for _ in range(3):
        world.end(0, 1).end(1, 1)
        restart(world)
    assert world.condition("Running")[0] == "True"


@pytest.mark.parametrize("how", [{"reason": "OOMKilled"}, {}])
def test_kills_do_not_count_whatever_the_report_says(how: dict[str, str]) -> None:
    world = a_job()
    for _ in range(3):
        world.end(1, 137, report=failed(137), **how).end(0, ExitCode.PEER_LOST, report=a_report(0))
        restart(world)
    assert world.condition("Running")[0] == "True"
    assert verdict(world).signature is None


def test_a_rule_that_asks_for_restarts_is_obeyed() -> None:
    rules = [{"name": "flaky", "action": "RestartGang", "onExitCodes": {"operator": "In", "values": [1]}}]
    world = a_job(failurePolicy={"rules": rules})
    for _ in range(3):
        restart(end(world, failed()))
    assert world.condition("Running")[0] == "True"


def test_a_rank_that_left_early_is_the_cause_and_its_peers_are_not() -> None:
    left = failed(ExitCode.LEFT_EARLY, error="SystemExit", step=9, steps_done=9)
    world = a_job()
    world.end(0, ExitCode.PEER_LOST, report=a_report(9), at="2026-01-01T11:59:59Z")
    world.end(1, ExitCode.LEFT_EARLY, report=left).settle()
    found = verdict(world)
    assert (found.reason, found.rank, found.class_) == ("LeftEarly", 1, "Program")
    end(restart(world), left, ExitCode.LEFT_EARLY)
    assert world.condition("Failed")[:2] == ("True", "LeftEarly")
