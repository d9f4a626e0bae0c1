"""A job whose pods a queue of Kueue holds back, lets go, and takes away again; and a job that is not ours."""

from typing import Any

import pytest

from disttrain_operator.decide.decision import CreatePod, DeletePod
from tests.unit.decide.world import World, a_world

QUEUED = {
    "runPolicy": {
        "schedulingPolicy": {"gangScheduler": "Kueue", "queueName": "research"},
        "startingDeadlineSeconds": 60,
    }
}
LABELS = {"kueue.x-k8s.io/queue-name": "research", "kueue.x-k8s.io/managed": "true"}


def gated(pod: dict[str, Any], **labels: str) -> dict[str, Any]:
    """The pod as the API server stores it with a scheduling gate; `labels` tell whether Kueue has taken it."""
    held = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gates"}
    metadata = {**pod["metadata"], "labels": {**pod["metadata"]["labels"], **labels}}
    return {**pod, "metadata": metadata, "status": {"phase": "Pending", "conditions": [held]}}


def a_queued_world(labels: dict[str, str] | None = None, **spec: Any) -> World:
    world = a_world(**QUEUED, **spec)
    world.step()
    for pod in list(world.pods.values()):
        world.put(gated(pod, **(LABELS if labels is None else labels)))
    return world.settle()


def let_go(world: World) -> World:
    """Kueue admits the group: its gates go."""
    for pod in list(world.pods.values()):
        if "deletionTimestamp" not in pod["metadata"]:
            world.put({**pod, "status": {"phase": "Pending"}})
    return world.settle()


def take_away(world: World, reason: str = "WorkloadEvictedDueToPreempted") -> World:
    """Kueue marks and deletes all pods; its finalizer stays."""
    now = world.now.strftime("%Y-%m-%dT%H:%M:%SZ")
    for pod in list(world.pods.values()):
        target = {
            "type": "TerminationTarget",
            "status": "True",
            "reason": reason,
            "message": "Preempted to accommodate",
            "lastTransitionTime": now,
        }
        running = pod["status"]["phase"] == "Running"
        metadata = {**pod["metadata"], "deletionTimestamp": now, "deletionGracePeriodSeconds": 30 if running else 0}
        world.put({**pod, "metadata": metadata, "status": {**pod["status"], "conditions": [target]}})
    return world


def attempts_of(world: World) -> set[str]:
    return {
        pod["metadata"]["labels"]["disttrain.io/attempt"]
        for pod in world.pods.values()
        if "deletionTimestamp" not in pod["metadata"]
    }


def test_pods_in_a_queue_are_queued_not_unschedulable() -> None:
    world = a_queued_world()
    status, reason, message = world.condition("Running")
    assert (status, reason) == ("False", "Queued")
    assert "queue research of Kueue" in message
    assert world.job.status.phase == "Pending"
    assert world.events[-1].reason == "Queued"
    assert not world.events[-1].warning


def test_a_queue_may_take_longer_than_the_starting_deadline() -> None:
    world = a_queued_world().pass_time(10_000).settle()
    assert world.condition("Running")[1] == "Queued"
    assert world.decide().requeue_at is None
    let_go(world)
    assert world.condition("Running")[1] == "WaitingForPods"
    assert world.job.status.attempts[-1].admitted_time is not None
    world.pass_time(59).settle()
    assert world.condition("Failed")[0] == "False"
    world.run_all()
    assert world.condition("Running")[0] == "True"


def test_an_admission_that_was_seen_only_when_all_pods_ran_is_noted_all_the_same() -> None:
    world = a_queued_world().run_all()
    attempt = world.job.status.attempts[-1]
    assert attempt.running_time is not None
    assert attempt.admitted_time is not None


def test_the_starting_deadline_runs_from_the_admission() -> None:
    world = let_go(a_queued_world().pass_time(10_000)).pass_time(61).settle()
    assert world.condition("Failed")[:2] == ("True", "StartingDeadlineExceeded")


def test_a_queue_that_nobody_serves_is_reported_and_does_not_stop_the_deadline() -> None:
    world = a_queued_world({"kueue.x-k8s.io/queue-name": "research"})
    _, reason, message = world.condition("Running")
    assert reason == "QueueNotServed"
    assert "integration `pod`" in message
    world.pass_time(61).settle()
    assert world.condition("Failed")[:2] == ("True", "QueueNotServed")


def test_gates_of_the_template_alone_are_no_queue() -> None:
    world = a_world(runPolicy={"startingDeadlineSeconds": 60}).settle()
    world.put(gated(world.pod(0)))
    world.settle()
    assert world.condition("Running")[1] == "SchedulingGated"
    assert world.pass_time(61).settle().condition("Failed")[0] == "True"


@pytest.mark.parametrize("reason", ["Unschedulable", "Schedulable", "Undetermined"])
def test_a_gang_that_volcano_does_not_place_is_unschedulable(reason: str) -> None:
    world = a_world().settle()
    held = {"type": "PodScheduled", "status": "False", "reason": reason, "message": "pod group is not ready"}
    world.put({**world.pod(0), "status": {"phase": "Pending", "conditions": [held]}})
    assert world.settle().condition("Running")[1] == "Unschedulable"


def test_a_preemption_by_the_queue_is_a_restart_that_does_not_count() -> None:
    world = let_go(a_queued_world(maxRestarts=None)).run_all()
    take_away(world)
    world.settle()
    assert world.condition("Running")[1] == "PodLeaving"
    for index in (0, 1):
        target = world.pod(index)["status"]["conditions"]
        world.end(index, 143)
        world.put({**world.pod(index), "status": {**world.pod(index)["status"], "conditions": target}})
    world.pass_time(5).settle()
    ledger = world.job.status
    assert (ledger.attempt, ledger.restarts, ledger.restarts_since_checkpoint) == (2, 1, 0)
    verdict = ledger.attempts[0].verdict
    assert (verdict.reason, verdict.class_) == ("Preempted", "Disruption")
    # The old pods are still there, held by Kueue's finalizer; they have ended and nobody waits for them.
    assert attempts_of(world) == {"2"}


def test_a_preemption_before_the_pods_ran_is_a_new_group_under_new_names() -> None:
    world = let_go(a_queued_world())
    take_away(world)
    world.settle()
    assert world.job.status.attempt == 2
    verdict = world.job.status.attempts[0].verdict
    assert verdict.reason == "Preempted"
    assert attempts_of(world) == {"2"}


def test_pods_that_vanished_from_an_admitted_group_are_not_added_to_it_again() -> None:
    world = let_go(a_queued_world())
    world.remove(world.pod(0)["metadata"]["name"], remembered=False)
    decision = world.decide()
    created = [action for action in decision.actions if isinstance(action, CreatePod)]
    assert all(action.attempt == 2 for action in created)
    assert world.settle().job.status.attempt == 2


def test_a_pod_that_was_deleted_in_the_queue_is_no_longer_waited_for() -> None:
    """Its name is taken until Kueue lets go of it: only another attempt has names to give."""
    world = a_queued_world()
    pod = world.pod(1)
    world.put(
        {
            **pod,
            "metadata": {
                **pod["metadata"],
                "deletionTimestamp": "2026-01-01T12:00:00Z",
                "deletionGracePeriodSeconds": 0,
            },
        }
    )
    world.settle()
    assert world.job.status.attempt == 2
    verdict = world.job.status.attempts[0].verdict
    assert verdict.reason == "PodLost"
    assert not [
        action
        for action in world.decide().actions
        if isinstance(action, DeletePod) and action.name == pod["metadata"]["name"]
    ]


def test_a_suspended_job_does_not_wait_for_a_finalizer() -> None:
    world = a_queued_world()
    world.edit(suspend=True)
    world.settle()
    for pod in list(world.pods.values()):
        world.put({**pod, "metadata": {**pod["metadata"], "deletionGracePeriodSeconds": 0}})
    world.settle()
    assert world.pods
    assert world.condition("Suspended")[0] == "True"


@pytest.mark.parametrize("spec", [{}, {"workers": {"replicas": "many"}}])
def test_a_job_of_another_controller_is_left_alone_whatever_it_says(spec: dict[str, Any]) -> None:
    world = a_world(managedBy="kueue.x-k8s.io/multikueue", **spec)
    decision = world.decide()
    assert (decision.reason, decision.message) == ("ManagedElsewhere", "left to kueue.x-k8s.io/multikueue")
    assert (decision.status, decision.actions, decision.events) == (None, (), ())


def test_a_finished_job_of_another_controller_is_not_deleted_by_us() -> None:
    status = {
        "attempt": 1,
        "completionTime": "2025-01-01T00:00:00Z",
        "conditions": [
            {
                "type": "Finished",
                "status": "True",
                "reason": "x",
                "message": "",
                "lastTransitionTime": "2025-01-01T00:00:00Z",
                "observedGeneration": 1,
            }
        ],
    }
    world = a_world(managedBy="example.com/other", runPolicy={"ttlSecondsAfterFinished": 0})
    world.raw_job["status"] = status
    assert world.decide().actions == ()


def test_a_job_that_names_this_operator_is_ours() -> None:
    world = a_world(managedBy="disttrain.io/operator").settle()
    assert len(world.pods) == 2
