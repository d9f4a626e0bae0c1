"""A job's life as the operator decides it: each test is one claim, told in the words a user reads."""

from typing import Any

import pytest

from disttrain_api.names import PERMANENT, ExitCode, Role, exit_reason
from disttrain_api.report import RankFailure
from disttrain_operator.decide.decision import CreatePod, CreateSupport, DeleteJob
from disttrain_operator.decide.observed import CreateProblem
from tests.builders import a_claim_template, a_report, running, waiting
from tests.unit.decide.world import a_running_world, a_world

COMMAND = {"spec": {"containers": [{"name": "trainer", "image": "an/image:1", "command": ["serve"]}]}}


def test_a_new_job_has_its_attempt_in_the_status_before_any_pod_exists() -> None:
    world = a_world()
    world.step(crash_after=1)
    assert world.job.status.attempt == 1
    assert world.pods == {}


def test_all_pods_are_created_in_one_step() -> None:
    decision = a_world(workers={"replicas": 3}).decide()
    assert isinstance(decision.actions[0], CreateSupport)
    assert [(a.role, a.index) for a in decision.actions if isinstance(a, CreatePod)] == [
        ("worker", 0),
        ("worker", 1),
        ("worker", 2),
    ]


def test_until_a_job_of_n_pods_runs_its_status_is_written_twice_and_two_events_are_posted() -> None:
    world = a_world(workers={"replicas": 5}).settle()
    for index in range(5):
        world.put(running(world.pod(index)))
        world.settle()
    assert world.status_writes == 2
    assert [event.reason for event in world.events] == ["CreatingPods", "AllPodsRunning"]
    assert world.condition("Running")[0] == "True"
    assert world.job.status.ready == "5/5"


def test_all_conditions_are_set_at_the_first_write() -> None:
    world = a_world().settle()
    assert {entry.type for entry in world.job.status.conditions} == {
        "Running",
        "Suspended",
        "Restarting",
        "Complete",
        "Failed",
        "Finished",
    }


def test_a_job_is_complete_when_all_workers_have_succeeded_and_keeps_what_they_reported() -> None:
    world = a_running_world(storage=a_claim_template())
    world.end(0, 0, report=a_report(100, checkpoint=100, accuracy=0.98)).end(1, 0).settle()
    status = world.job.status
    assert world.condition("Finished") == ("True", "WorkersSucceeded", "all 2 workers succeeded")
    assert status.phase == "Succeeded"
    assert status.progress is not None
    assert [(metric.name, metric.value) for metric in status.progress.metrics] == [("accuracy", 0.98)]
    assert status.checkpoint is not None
    assert status.checkpoint.step == 100
    assert status.completion_time


def test_a_job_whose_last_evaluation_failed_is_complete_and_says_so() -> None:
    world = a_running_world()
    report = a_report(100)
    assert report.progress is not None
    failed = report.progress.model_copy(update={"evaluation_failure": "the evaluation after step 100 failed"})
    world.end(0, 0, report=report.model_copy(update={"progress": failed})).end(1, 0).settle()
    assert world.job.status.phase == "Succeeded"
    assert world.job.status.progress is not None
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


def test_a_killed_rank_restarts_the_gang_once_the_old_pods_are_gone() -> None:
    world = a_running_world().end(1, 137).settle()
    assert (world.job.status.attempt, world.job.status.restarts) == (2, 1)
    assert world.condition("Running") == ("False", "WaitingForOldPods", "waiting for pods older than attempt 2 to end")
    assert {pod["metadata"]["labels"]["disttrain.io/attempt"] for pod in world.pods.values()} == {"1"}
    world.confirm_deletions().settle().run_all()
    assert {pod["metadata"]["labels"]["disttrain.io/attempt"] for pod in world.pods.values()} == {"2"}
    assert world.condition("Restarting")[0] == "False"
    verdict = world.job.status.attempts[0].verdict
    assert verdict is not None
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
    assert verdict is not None
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


def test_a_new_checkpoint_renews_the_budget() -> None:
    world = a_running_world(storage=a_claim_template(), runPolicy={"maxRestarts": 1})
    for step in (10, 20, 30):
        world.end(0, 1, report=a_report(step, checkpoint=step)).end(1, 1).settle()
        world.confirm_deletions().settle().run_all()
    assert world.condition("Running")[0] == "True"
    assert (world.job.status.restarts, world.job.status.restarts_since_checkpoint) == (3, 1)


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
    assert verdict is not None
    assert (verdict.reason, verdict.pod) == ("PodLost", "digits-3f9a1-worker-1-a1")


def test_a_pod_deleted_before_the_gang_ran_is_made_again() -> None:
    world = a_world().settle()
    world.remove(world.pod(1)["metadata"]["name"])
    world.settle()
    assert len(world.pods) == 2
    assert world.job.status.attempt == 1


def test_an_image_that_cannot_be_pulled_is_said_at_once_and_only_once() -> None:
    template = {"spec": {"containers": [{"name": "trainer", "image": "an/image:1"}]}}
    world = a_world(workers={"replicas": 2, "template": template}).settle()
    for reason in ("ErrImagePull", "ImagePullBackOff", "ErrImagePull"):
        world.put(waiting(world.pod(0), reason, f"some changing words {reason}"))
        world.settle()
    assert world.condition("Running") == (
        "False",
        "ImagePullBackOff",
        (
            'pod digits-3f9a1-worker-0-a1: image "an/image:1" cannot be pulled; check the image\'s name and tag, '
            "and the pull secret"
        ),
    )
    assert world.job.status.phase == "Pending"
    assert world.status_writes == 2
    assert [event.reason for event in world.events] == ["CreatingPods", "ImagePullBackOff"]


def test_pods_that_never_start_fail_the_job_after_the_starting_deadline_with_their_reason() -> None:
    world = a_world(runPolicy={"startingDeadlineSeconds": 60}).settle()
    world.put(waiting(world.pod(0), "ImagePullBackOff"))
    world.settle().pass_time(59).settle()
    assert world.condition("Failed")[0] == "False"
    world.pass_time(1).settle()
    status, reason, message = world.condition("Failed")
    assert (status, reason) == ("True", "ImagePullBackOff")
    assert message.startswith("not all pods ran within startingDeadlineSeconds (60): pod digits-3f9a1-worker-0-a1")


def test_a_cause_that_goes_away_in_time_leaves_no_trace_but_its_event() -> None:
    world = a_world().settle()
    world.problems = [CreateProblem("Pod", "digits-3f9a1-worker-1-a1", 403, "QuotaExceeded", "exceeded quota: small")]
    world.remove(world.pod(1)["metadata"]["name"], remembered=False)
    world.step()
    assert world.condition("Running")[1:] == (
        "QuotaExceeded",
        "Pod digits-3f9a1-worker-1-a1: exceeded quota: small; raise the namespace's quota or ask for less",
    )
    world.problems = []
    world.settle().run_all()
    assert world.condition("Running")[0] == "True"


IDS = (
    "where the template has no user and group the operator sets them: `podDefaults.userId: null` in the chart's values"
    " leaves them to the cluster, `runPolicy.podSecurity: Template` this job's whole security context to its template"
)


@pytest.mark.parametrize(
    ("reason", "message", "policy", "advice"),
    [
        ("Forbidden", ".containers[0].runAsUser: Invalid value: 65532: must be in the ranges: [7, 9]", {}, IDS),
        ("Forbidden", ".spec.securityContext.fsGroup: Invalid value: []int64{65532}: not an allowed group", {}, IDS),
        ("InvalidPod", "denied request: securityContext.runAsGroup must not be set", {}, IDS),
        ("Forbidden", "supplementalGroups and more", {}, "let the template meet the namespace's rules, or change them"),
        (
            "Forbidden",
            "runAsUser: 7",
            {"podSecurity": "Template"},
            "let the template meet the namespace's rules, or change",
        ),
        ("InvalidPod", "spec.containers[0].name: Required", {}, "correct the pod template"),
        (
            "Forbidden",
            'pods "x" is forbidden: failed quota: team: must specify limits.cpu for: trainer',
            {},
            "say how much in `workers.resources` and `parameterServers.resources`, or in the template's containers",
        ),
    ],
)
def test_where_a_rule_of_the_namespace_refuses_pods_the_fields_are_named(
    reason: str, message: str, policy: dict[str, Any], advice: str
) -> None:
    world = a_world(runPolicy=policy).settle()
    world.problems = [CreateProblem("Pod", "digits-3f9a1-worker-1-a1", 403, reason, message)]
    status, found, sentence = world.settle().condition("Running")
    assert (status, found) == ("False", reason)
    assert sentence.startswith(f"Pod digits-3f9a1-worker-1-a1: {message}; {advice}")


def test_the_active_deadline_fails_the_job_and_stops_its_pods() -> None:
    world = a_running_world(activeDeadlineSeconds=100).pass_time(100).settle()
    assert world.condition("Failed")[1] == "DeadlineExceeded"
    assert all("deletionTimestamp" in pod["metadata"] for pod in world.pods.values())


def test_time_in_suspension_does_not_count_towards_the_active_deadline() -> None:
    world = a_running_world(activeDeadlineSeconds=100).edit(suspend=True).settle()
    world.end(0, 143).end(1, 143).confirm_deletions().settle().pass_time(1000).settle()
    world.edit(suspend=False).settle().run_all()
    assert world.condition("Failed")[0] == "False"


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ("Running", {"digits-3f9a1-worker-1-a1"}),
        ("All", set()),
        ("None", {"digits-3f9a1-worker-0-a1", "digits-3f9a1-worker-1-a1"}),
    ],
)
def test_clean_pod_policy_decides_which_pods_of_a_finished_job_stay(policy: str, left: set[str]) -> None:
    world = a_running_world(runPolicy={"cleanPodPolicy": policy, "restartPolicy": "Never"})
    world.end(1, 1).pass_time(5).settle().confirm_deletions().settle()
    assert world.condition("Failed")[0] == "True"
    assert set(world.pods) == left


def test_a_finished_job_is_deleted_when_its_time_to_live_is_over() -> None:
    world = a_running_world(ttlSecondsAfterFinished=30).end(0, 0).end(1, 0).settle()
    decision = world.pass_time(29).decide()
    assert not any(isinstance(action, DeleteJob) for action in decision.actions)
    assert decision.look_again_at is not None
    assert any(isinstance(action, DeleteJob) for action in world.pass_time(1).decide().actions)


def test_a_spec_that_cannot_run_fails_with_every_problem_and_makes_no_pod() -> None:
    world = a_world(
        training={"optimizer": {"name": "Adam", "momentum": 0.9}}, parallelism={"dataParallelReplicateDegree": 3}
    ).settle()
    status, reason, message = world.condition("Failed")
    assert (status, reason) == ("True", "InvalidSpec")
    assert "world size 2" in message
    assert "momentum" in message
    assert world.pods == {}


def test_a_spec_with_an_unknown_field_is_a_fact_not_an_exception() -> None:
    world = a_world(workers={"replica": 3}).settle()
    assert world.condition("Failed")[1] == "InvalidSpec"
    assert "replica" in world.condition("Failed")[2]


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    world = a_running_world()
    world.raw_job["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    world.pods.clear()
    decision = world.decide()
    assert decision.actions == ()
    assert decision.status is None


def test_a_crash_between_any_two_requests_of_a_restart_loses_and_doubles_nothing() -> None:
    for crash_after in range(6):
        world = a_running_world().end(0, 1).end(1, 1)
        world.step(crash_after=crash_after)
        world.settle().confirm_deletions().settle().run_all()
        assert (world.job.status.attempt, world.job.status.restarts) == (2, 1)
        assert len(world.pods) == 2
        assert [event.reason for event in world.events].count("GangRestarted") == 1
