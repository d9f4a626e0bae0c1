"""Pods that the gate let go and that no node takes: called back where their room is lost, and only there."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import CreatePod, Decision, DeletePod
from disttrain_operator.decide.observed import Admission, job_facts
from disttrain_operator.decide.reading import observe
from disttrain_operator.plan.identity import child_name
from tests.builders import NOW, a_raw_job, a_raw_pod


def after_release(seconds: float, *, lost: frozenset[str] = frozenset(), refusal: str = "Unschedulable") -> Decision:
    """What is decided so long after a gang of two was let go, of which no pod has a node."""
    policy = {"schedulingPolicy": {"gangScheduler": "Gate"}, "startingDeadlineSeconds": 600}
    status = {"attempt": 1, "attempts": [{"number": 1, "startTime": timestamp(NOW - timedelta(hours=9))}]}
    job = job_facts(a_raw_job(status=status, runPolicy=policy))
    pods: list[dict[str, Any]] = [a_raw_pod(job, index=index) for index in range(2)]
    condition = {"type": "PodScheduled", "status": "False", "reason": refusal, "message": "a port is in use"}
    for pod in pods:
        noted = {"disttrain.io/released-at": timestamp(NOW), "disttrain.io/reserved-node": "n1"}
        pod["metadata"]["annotations"] = noted
        pod["status"]["conditions"] = [condition]
    observed = replace(observe(pods, services=[child_name(job.name, job.uid)]), admission=Admission(lost=lost))
    return decide(job, observed, NOW + timedelta(seconds=seconds))


def test_a_pod_that_was_let_go_a_moment_ago_says_nothing_of_the_gate() -> None:
    """Its condition keeps the gate's reason until the scheduler looks at it: no news, and no write of the status."""
    decision = after_release(1, refusal="SchedulingGated")
    assert decision.reason == "WaitingForPods"


def test_a_pod_whose_room_is_lost_is_deleted_after_a_while_and_never_by_force() -> None:
    uid = "uid-digits-3f9a1-worker-1-a1"
    assert not [action for action in after_release(29, lost=frozenset({uid})).actions if isinstance(action, DeletePod)]
    decision = after_release(30, lost=frozenset({uid}))
    (deleted,) = [action for action in decision.actions if isinstance(action, DeletePod)]
    assert deleted.uid == uid
    assert deleted.grace_seconds, "it may have been bound a moment ago, and run already"
    assert not [action for action in decision.actions if isinstance(action, CreatePod)], "its name is taken"


def test_what_the_scheduler_refuses_for_reasons_of_its_own_is_not_tried_for_ever() -> None:
    waiting = after_release(100)
    assert waiting.actions == ()
    assert waiting.reason == "Unschedulable"
    assert "a port is in use" in waiting.message
    assert waiting.look_again_at == NOW + timedelta(seconds=600), "nothing to look at until the deadline"
    failed = after_release(600)
    assert failed.reason == "Unschedulable"
    assert "not all pods ran within startingDeadlineSeconds (600)" in failed.message
