"""A job's life as the operator decides it: each test is one claim about what a user reads."""

import pytest

from disttrain_operator.decide.decision import CreatePod, CreateSupport, DeleteJob
from disttrain_operator.decide.observed import CreateProblem
from tests.builders import ended, running, waiting, with_sidecar
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
        "Straggling",
        "HangSuspected",
    }


def test_a_pod_deleted_before_the_gang_ran_is_made_again() -> None:
    world = a_world().settle()
    world.remove(world.pod(1)["metadata"]["name"])
    world.settle()
    assert len(world.pods) == 2
    assert world.job.status.attempt == 1


def test_an_image_that_cannot_be_pulled_is_reported_at_once_and_only_once() -> None:
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
        ("Forbidden", "supplementalGroups and more", {}, "make the template follow the namespace's rules"),
        (
            "Forbidden",
            "runAsUser: 7",
            {"podSecurity": "Template"},
            "make the template follow the namespace's rules, or change",
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
def test_where_a_rule_of_the_namespace_refuses_pods_the_fields_are_named(reason, message, policy, advice):
    world = a_world(runPolicy=policy).settle()
    world.problems = [CreateProblem("Pod", "digits-3f9a1-worker-1-a1", 403, reason, message)]
    status, found, sentence = world.settle().condition("Running")
    assert (status, found) == ("False", reason)
    assert sentence.startswith(f"Pod digits-3f9a1-worker-1-a1: {message}; {advice}")


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


def test_the_log_of_a_pod_whose_phase_lags_behind_is_kept() -> None:
    """Its container has ended, and the kubelet says that the pod runs, as it does for a moment."""
    world = a_running_world(runPolicy={"restartPolicy": "Never"})
    failed = with_sidecar(ended(world.pod(1), 1))
    world.put(failed)
    world.pass_time(5).settle().confirm_deletions().settle()
    assert world.condition("Failed")[0] == "True"
    assert set(world.pods) == {"digits-3f9a1-worker-1-a1"}
    assert failed["metadata"].get("deletionTimestamp") is None
    world.put(ended(world.pod(1), 1))
    world.pass_time(60).settle().confirm_deletions().settle()
    assert set(world.pods) == {"digits-3f9a1-worker-1-a1"}


def test_a_container_that_goes_on_beside_the_program_ends_with_the_job() -> None:
    world = a_running_world(runPolicy={"restartPolicy": "Never"})
    world.put(with_sidecar(ended(world.pod(1), 1)))
    world.pass_time(5).settle().confirm_deletions().settle()
    again = world.decide().requeue_at
    assert again is not None
    world.now = again
    world.settle().confirm_deletions().settle()
    assert set(world.pods) == set()


def test_a_finished_job_is_deleted_when_its_time_to_live_is_over() -> None:
    world = a_running_world(ttlSecondsAfterFinished=30).end(0, 0).end(1, 0).settle()
    decision = world.pass_time(29).decide()
    assert not any(isinstance(action, DeleteJob) for action in decision.actions)
    assert decision.requeue_at is not None
    assert any(isinstance(action, DeleteJob) for action in world.pass_time(1).decide().actions)


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
