"""When a job is complete; and a member's success is final, whatever becomes of its pod and of the operator's memory."""

from typing import Any

import pytest

from disttrain_api.names import Role
from disttrain_operator.decide.decision import CreatePod
from disttrain_operator.decide.gang import members_as_text, members_of_text
from tests.builders import a_claim_template, a_report
from tests.unit.decide.test_failures import COMMAND, OWN, own_world, verdict
from tests.unit.decide.world import World, a_running_world, a_world

SERVER: dict[str, Any] = {"parameterServers": {"replicas": 2, "template": COMMAND}}


def forget(world: World, index: int, role: Role = Role.WORKER) -> World:
    """The pod is deleted, and nobody remembers it: the operator was restarted, or two minutes have passed."""
    world.remove(world.pod(index, role)["metadata"]["name"], remembered=False)
    return world


def test_a_job_is_complete_when_all_workers_have_succeeded_and_keeps_what_they_reported() -> None:
    world = a_running_world(storage=a_claim_template())
    world.end(0, 0, report=a_report(100, checkpoint=100, accuracy=0.98)).end(1, 0).settle()
    status = world.job.status
    assert world.condition("Finished") == ("True", "WorkersSucceeded", "all 2 workers succeeded")
    assert status.phase == "Succeeded"
    assert [(metric.name, metric.value) for metric in status.progress.metrics] == [("accuracy", 0.98)]
    assert status.checkpoint.step == 100
    assert status.completion_time


def test_a_job_whose_last_evaluation_failed_is_complete_and_says_so() -> None:
    world = a_running_world()
    report = a_report(100)
    failed = report.progress.model_copy(update={"evaluation_failure": "the evaluation after step 100 failed"})
    world.end(0, 0, report=report.model_copy(update={"progress": failed})).end(1, 0).settle()
    assert world.job.status.phase == "Succeeded"
    assert world.job.status.progress.evaluation_failure == "the evaluation after step 100 failed"


def test_one_worker_that_ended_well_does_not_end_the_job() -> None:
    world = a_running_world().end(0, 0).settle()
    assert world.condition("Finished")[0] == "False"
    assert world.condition("Running")[0] == "True"


def test_parameter_servers_end_when_the_workers_do() -> None:
    world = a_running_world(
        training=None, workers={"template": COMMAND}, parameterServers={"replicas": 1, "template": COMMAND}
    )
    world.end(0, 0).end(1, 0).settle()
    server = world.pod(0, Role.PS)
    assert "deletionTimestamp" in server["metadata"]
    world.confirm_deletions().settle()
    assert world.condition("Complete")[0] == "True"
    assert [(count.role, count.active) for count in world.job.status.replica_statuses] == [("worker", 0), ("ps", 0)]


def test_a_job_whose_every_failure_is_ignored_has_not_succeeded() -> None:
    world = own_world({"action": "Ignore"})
    for index in range(3):
        world.end(index, 1)
    world.settle()
    assert world.condition("Failed")[:2] == ("True", "AllIgnored")


@pytest.mark.parametrize(("operator", "ends"), [("Any", [1]), ("First", [0]), ("All", [0, 1, 2])])
def test_a_success_policy_ends_the_job_and_its_other_pods(operator: str, ends: list[int]) -> None:
    world = own_world(successPolicy={"operator": operator})
    for index in ends:
        assert world.condition("Complete")[0] == "False"
        world.end(index, 0).settle()
    assert world.condition("Complete")[0] == "True"
    assert all("deletionTimestamp" in world.pod(index)["metadata"] for index in {0, 1, 2} - set(ends))


def test_servers_may_decide_the_success() -> None:
    world = a_running_world(
        **OWN, parameterServers={"replicas": 1, "template": COMMAND}, runPolicy={"successPolicy": {"role": "ps"}}
    )
    world.end(0, 0, Role.PS).settle()
    assert world.condition("Complete")[:2] == ("True", "ServersSucceeded")


def test_a_success_stands_in_the_status_before_anything_is_done_about_it() -> None:
    world = own_world().end(1, 0)
    world.step(crash_after=1)
    assert world.job.status.attempts[-1].succeeded == "worker 1"


def test_a_member_that_has_succeeded_and_is_gone_is_neither_lost_nor_made_again() -> None:
    world = forget(own_world().end(1, 0).settle(), 1)
    decision = world.decide()
    assert (decision.reason, decision.actions) == ("AllPodsRunning", ())
    world.settle()
    assert (world.job.status.attempt, world.job.status.restarts) == (1, 0)
    world.end(0, 0).settle()
    forget(world, 0).end(2, 0).settle()
    assert world.condition("Complete") == ("True", "WorkersSucceeded", "all 3 workers succeeded")
    assert [(count.role, count.succeeded) for count in world.job.status.replica_statuses] == [("worker", 3)]


def test_a_member_that_has_succeeded_before_all_had_started_is_not_made_again() -> None:
    world = a_world(**OWN).settle()
    world.end(0, 0).settle()
    forget(world, 0)
    assert not [action for action in world.decide().actions if isinstance(action, CreatePod)]
    world.settle().run_all()
    assert world.condition("Running")[:2] == ("True", "AllPodsRunning")


def test_a_single_pod_that_is_made_again_does_not_bring_back_one_that_has_succeeded() -> None:
    world = own_world({"action": "RestartPod"}, restartBackoffSeconds=0).end(2, 0).settle()
    forget(world, 2).end(1, 5).settle().confirm_deletions().settle().run_all()
    assert world.condition("Running")[:2] == ("True", "AllPodsRunning")
    assert sorted(world.pods) == ["digits-3f9a1-worker-0-a1", "digits-3f9a1-worker-1-a1"]
    assert world.job.status.restarts == 1


def test_a_parameter_server_that_has_ended_well_may_go() -> None:
    world = a_running_world(**OWN, **SERVER).end(1, 0, Role.PS).settle()
    forget(world, 1, Role.PS).settle()
    assert (world.job.status.attempt, world.condition("Running")[0]) == (1, "True")
    assert world.job.status.attempts[-1].succeeded == "ps 1"


@pytest.mark.parametrize(("operator", "ends"), [("First", [0]), ("Any", [2])])
def test_the_success_that_decides_is_known_also_where_its_pod_went_before(operator: str, ends: list[int]) -> None:
    world = own_world(successPolicy={"operator": operator})
    for index in ends:
        world.end(index, 0)
    world.raw_job["status"]["attempts"][-1]["succeeded"] = f"worker {ends[0]}"
    for index in ends:
        forget(world, index)
    assert world.settle().condition("Complete")[0] == "True"


def test_another_attempt_begins_with_all_members_again() -> None:
    world = own_world(restartBackoffSeconds=0).end(1, 0).settle()
    forget(world, 1).end(0, 137).settle().confirm_deletions().settle().run_all()
    assert verdict(world).pod == "digits-3f9a1-worker-0-a1"
    assert [attempt.succeeded for attempt in world.job.status.attempts] == [None, None]
    assert len(world.pods) == 3
    assert world.job.status.attempt == 2


def test_a_gang_of_which_one_has_finished_is_not_taken_for_one_that_hangs_when_that_one_is_gone() -> None:
    from disttrain_operator.decide.gang import Gang
    from disttrain_operator.decide.hang import hang_of
    from disttrain_operator.decide.live import Live, Stall
    from disttrain_operator.decide.reading import observe

    world = a_running_world(runPolicy={"progressDeadlineSeconds": 60})
    live = Live(world.pod(0)["metadata"]["uid"], 1, None, Stall(0, 61, 5, 1.0))
    spec = world.job.spec
    assert spec is not None
    assert hang_of(Gang(spec, world.job.status, observe(world.pods.values(), live=live)), world.now) is not None
    forget(world.end(1, 0).settle(), 1)
    assert hang_of(Gang(spec, world.job.status, observe(world.pods.values(), live=live)), world.now) is None


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([], None),
        ([(Role.WORKER, 0)], "worker 0"),
        ([(Role.PS, 1), (Role.WORKER, 3), (Role.WORKER, 1), (Role.WORKER, 2)], "worker 1-3 ps 1"),
        ([(Role.WORKER, 0), (Role.WORKER, 2), (Role.WORKER, 3)], "worker 0,2-3"),
    ],
)
def test_members_are_written_as_ranges(members: list[tuple[Role, int]], text: str | None) -> None:
    assert members_as_text(members) == text
    assert members_of_text(text, {Role.WORKER: 4, Role.PS: 2}) == frozenset(members)


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("worker 2-999999999", {2, 3}),
        ("worker 7", set()),
        ("worker 3-1,0", {0}),
        ("worker 0-3,0-3,1", {0, 1, 2, 3}),
        ("chief 0 worker ,x1 worker ,1- worker ,1 ps 4", {1}),
        ("worker", set()),
        ("worker " + "9" * 5000, set()),
        ("\x00", set()),
    ],
)
def test_what_another_version_or_anybody_wrote_there_names_no_more_than_there_is(text: str, indices: set[int]) -> None:
    assert members_of_text(text, {Role.WORKER: 4, Role.PS: 0}) == {(Role.WORKER, index) for index in indices}


def test_every_other_of_a_thousand_members_takes_little() -> None:
    text = members_as_text((Role.WORKER, index) for index in range(0, 1000, 2))
    assert text is not None
    assert len(text) < 2048
