"""Pods that the gate let go and that no node takes: called back where their room is lost, and only there."""

import re
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import CreatePod, Decision, DeletePod
from disttrain_operator.decide.observed import Admission, job_facts
from disttrain_operator.decide.policies.admission import REFUSED_SECONDS
from disttrain_operator.decide.reading import observe
from disttrain_operator.plan.identity import child_name
from tests.builders import NOW, a_raw_job, a_raw_pod


def after_release(
    seconds: float,
    *,
    lost: frozenset[str] = frozenset(),
    refusal: str = "Unschedulable",
    deadline: int | None = 600,
    placed: tuple[int, ...] = (),
    refused_before: int = 0,
) -> Decision:
    """What is decided so long after a gang of two was let go, of which the `placed` pods have a node."""
    policy = {"schedulingPolicy": {"gangScheduler": "Gate"}, "startingDeadlineSeconds": deadline}
    began = timestamp(NOW - timedelta(hours=9))
    verdict = {"reason": "Unschedulable", "message": "m", "class": "NotStarted", "action": "RestartWithoutCounting"}
    ended = {"startTime": began, "endTime": began, "verdict": verdict}
    attempts = [{"number": number + 1, **ended} for number in range(refused_before)]
    number = refused_before + 1
    status = {"attempt": number, "attempts": [*attempts, {"number": number, "startTime": began}], "startTime": began}
    job = job_facts(a_raw_job(status=status, runPolicy=policy))
    pods: list[dict[str, Any]] = [a_raw_pod(job, index=index, attempt=number) for index in range(2)]
    condition = {"type": "PodScheduled", "status": "False", "reason": refusal, "message": "a port is in use"}
    for pod in pods:
        noted = {"disttrain.io/released-at": timestamp(NOW), "disttrain.io/reserved-node": "n1"}
        pod["metadata"]["annotations"] = noted
        pod["status"]["conditions"] = [condition]
    for index in placed:
        pods[index]["spec"]["nodeName"] = "n1"
        pods[index]["status"]["conditions"] = []
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
    assert waiting.requeue_at == NOW + timedelta(seconds=600), "nothing to look at until the deadline"
    failed = after_release(600)
    assert failed.reason == "Unschedulable"
    assert "not all pods ran within startingDeadlineSeconds (600)" in failed.message


@given(
    seconds=st.integers(0, 3 * REFUSED_SECONDS),
    placed=st.sampled_from([(), (0,), (1,), (0, 1)]),
    deadline=st.sampled_from([None, REFUSED_SECONDS // 2, 2 * REFUSED_SECONDS]),
    refusal=st.sampled_from(["Unschedulable", "SchedulingGated"]),
)
def test_a_gang_keeps_no_room_for_long_that_the_scheduler_does_not_give_it(
    seconds: int, placed: tuple[int, ...], deadline: int | None, refusal: str
) -> None:
    """Red where a gang that is not placed waits for ever."""
    decision = after_release(seconds, placed=placed, deadline=deadline, refusal=refusal)
    assert decision.status is not None
    deleted = [action for action in decision.actions if isinstance(action, DeletePod)]
    if len(placed) == 2 or seconds < min(REFUSED_SECONDS, deadline or REFUSED_SECONDS):
        assert (decision.status.attempt, deleted) == (1, [])
    elif deadline is not None and seconds >= deadline:
        assert decision.status.phase == "Failed"
    else:
        assert len(deleted) == 2, "no half gang keeps its room"
        assert (decision.status.attempt, decision.status.restarts_since_checkpoint) == (2, 0), "which costs no restart"
        assert decision.status.attempts[0].verdict is not None
        assert "releases its room" in decision.status.attempts[0].verdict.message


def test_a_gang_that_is_refused_again_and_again_waits_longer_and_longer() -> None:
    pauses = []
    for refused_before in range(1, 6):
        decision = after_release(REFUSED_SECONDS, deadline=None, refused_before=refused_before)
        assert decision.reason == "BackingOff"
        at = decision.status.attempts[-1].end_time if decision.status is not None else None
        begins = re.search(r"begins at (\S+?):? ", decision.message + " ")
        assert at is not None
        assert begins is not None
        pauses.append((datetime.fromisoformat(begins[1]) - datetime.fromisoformat(at)).total_seconds())
    assert pauses == [pauses[0] * 2**number for number in range(5)]
