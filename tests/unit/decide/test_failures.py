"""What follows from which failure: classes, rules, counting, pauses, suspicion, single pods."""

from typing import Any

import pytest

from disttrain_api.names import ExitCode
from disttrain_api.report import RankFailure
from disttrain_api.status import Verdict
from tests.builders import a_claim_template, a_report
from tests.unit.decide.world import World, a_running_world

COMMAND = {"spec": {"containers": [{"name": "trainer", "image": "an/image:1", "command": ["serve"]}]}}
OWN: dict[str, Any] = {"training": None, "workers": {"replicas": 3, "template": COMMAND}}


def own_world(*rules: dict[str, Any], **policy: Any) -> World:
    """Three pods with a program of their own and these rules."""
    run_policy = {**({"failurePolicy": {"rules": list(rules)}} if rules else {}), **policy}
    return a_running_world(**OWN, runPolicy=run_policy)


def verdict(world: World, attempt: int = 1) -> Verdict:
    """Why the attempt ended."""
    found = next(entry.verdict for entry in world.job.status.attempts if entry.number == attempt)
    assert found is not None
    return found


def restart(world: World) -> World:
    """The old pods go, the new ones run."""
    return world.settle().confirm_deletions().settle().run_all()


def test_a_pod_on_a_dead_node_is_given_up_at_once_and_removed_by_force() -> None:
    world = a_running_world().drain(1, "DeletionByTaintManager", ready=False).settle()
    assert verdict(world).class_ == "NodeLost"
    assert world.job.status.attempt == 2
    world.end(0, 1).remove(world.pod(0)["metadata"]["name"])
    world.settle()
    assert len(world.pods) == 1, "nothing is made while it may still run"
    again = world.decide().requeue_at
    assert again is not None
    world.now = again
    world.settle()
    assert {pod["metadata"]["labels"]["disttrain.io/attempt"] for pod in world.pods.values()} == {"2"}
    assert len(world.pods) == 2


def test_a_peer_that_all_have_lost_is_waited_for_and_its_dead_node_named() -> None:
    world = a_running_world()
    symptom = a_report(5, failure=RankFailure(rank=0, exit_code=91, reason="PeerLost", message="another rank is gone"))
    world.end(0, ExitCode.PEER_LOST, report=symptom).settle().pass_time(60).settle()
    assert world.job.status.attempt == 1, "what the others lost may become known yet"
    world.pod(1)["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.settle()
    found = verdict(world)
    assert (found.class_, found.node, found.action) == ("NodeLost", "node1", "RestartWithoutCounting")
    assert found.pod == "digits-3f9a1-worker-1-a1"


def test_a_peer_without_any_report_does_not_hold_the_job_for_ever() -> None:
    world = a_running_world().end(0, ExitCode.PEER_LOST, report=a_report(5)).settle().pass_time(91).settle()
    assert (world.job.status.attempt, verdict(world).class_) == (2, "PeerLost")


def test_a_pod_that_fails_its_own_probe_is_not_cut_off() -> None:
    world = a_running_world().end(0, ExitCode.PEER_LOST, report=a_report(5))
    world.pod(1)["status"]["conditions"] = [{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}]
    world.settle()
    assert world.job.status.attempt == 1


def test_a_node_that_is_given_up_in_peace_lets_its_pod_end() -> None:
    world = a_running_world().drain(1, "DeletionByTaintManager").settle()
    assert world.job.status.attempt == 1
    assert world.condition("Running")[1] == "PodLeaving"


def test_a_deleted_pod_that_never_ends_is_given_up_after_its_timeout() -> None:
    world = a_running_world(runPolicy={"terminationTimeoutSeconds": 30}).drain(1, None).settle()
    world.pass_time(60 + 29).settle()
    assert world.job.status.attempt == 1
    world.pass_time(1).settle()
    assert world.job.status.attempt == 2
    assert "digits-3f9a1-worker-1-a1" not in world.pods


def test_a_finalizer_is_not_asked_twice() -> None:
    world = a_running_world().drain(1, "DeletionByTaintManager", ready=False)
    world.pod(1)["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]
    world.settle().pass_time(61).settle()
    assert world.pods["digits-3f9a1-worker-1-a1"]["metadata"]["deletionGracePeriodSeconds"] == 0
    assert world.decide().actions == ()


def test_pauses_double_until_a_new_checkpoint() -> None:
    world = a_running_world(storage=a_claim_template(), runPolicy={"maxRestarts": 9, "restartBackoffSeconds": 10})
    pauses = []
    for report in (None, None, None, a_report(10, checkpoint=10), a_report(10, checkpoint=10)):
        world.end(0, 1, report=report).end(1, 1).settle().confirm_deletions().settle()
        ended = world.now
        again = world.decide().requeue_at if not world.pods else ended
        assert again is not None
        pauses.append((again - ended).total_seconds())
        if pauses[-1]:
            assert world.condition("Restarting")[0] == "True"
            assert world.condition("Running")[1] == "BackingOff"
            assert "RankFailed" not in world.condition("Restarting")[2]
        world.now = again
        world.settle().run_all()
        assert world.condition("Running")[0] == "True"
    assert pauses == [0, 10, 20, 0, 10]


def test_a_clock_that_was_set_back_makes_no_pause_longer() -> None:
    world = a_running_world()
    world.end(0, 1).end(1, 1)
    restart(world).end(0, 1).end(1, 1).settle().confirm_deletions().settle()
    assert not world.pods
    world.pass_time(-86_400).settle()
    assert len(world.pods) == 2


def test_a_job_can_be_suspended_in_its_pause() -> None:
    world = a_running_world()
    world.end(0, 1).end(1, 1)
    restart(world).end(0, 1).end(1, 1).settle().confirm_deletions().settle()
    world.edit(suspend=True).settle().pass_time(100).settle()
    assert world.condition("Suspended")[0] == "True"
    assert not world.pods
    world.edit(suspend=False).settle().run_all()
    assert world.condition("Running")[0] == "True"
    assert (world.job.status.attempt, world.job.status.restarts) == (3, 2)


def test_a_node_on_which_two_attempts_failed_first_is_avoided_and_named() -> None:
    world = a_running_world(runPolicy={"restartBackoffSeconds": 0})
    for _ in range(2):
        world.end(1, 137)
        restart(world)
    last = world.job.status.attempts[-1]
    assert (last.number, last.avoided_nodes) == (3, ["node1"])
    assert [event.message for event in world.events if event.reason == "NodeSuspected"] == [
        "attempt 3 avoids node1: several attempts failed first there"
    ]
    actions = [action for action in world_before_creation().actions if hasattr(action, "avoid")]
    assert [action.avoid for action in actions] == [("node1",), ("node1",)]


def world_before_creation() -> Any:
    """The decision that creates the pods of an attempt that avoids a node."""
    world = a_running_world(runPolicy={"restartBackoffSeconds": 0})
    world.end(1, 137)
    restart(world).end(1, 137).settle().confirm_deletions()
    return world.decide()


def test_failures_of_long_ago_and_permanent_ones_make_no_suspect() -> None:
    world = a_running_world(runPolicy={"restartBackoffSeconds": 0, "nodeSuspicion": {"windowSeconds": 60}})
    for _ in range(3):
        world.end(1, 137, at=world.now.strftime("%Y-%m-%dT%H:%M:%SZ"))
        restart(world).pass_time(61)
    assert world.job.status.attempts[-1].avoided_nodes == []


@pytest.mark.parametrize(
    ("rule", "code", "matches"),
    [
        ({"onExitCodes": {"operator": "In", "values": [42]}}, 42, True),
        ({"onExitCodes": {"operator": "In", "values": [42]}}, 43, False),
        ({"onExitCodes": {"operator": "NotIn", "values": [42]}}, 43, True),
        ({"onExitCodes": {"operator": "NotIn", "values": [0]}}, 43, True),
        ({"onExitCodes": {"operator": "In", "values": [42], "containerName": "trainer"}}, 42, True),
        ({"signals": [9]}, 137, True),
        ({"signals": [9]}, 9, False),
        ({"reasons": ["RankFailed"]}, 5, True),
        ({"reasons": ["OOMKilled"]}, 5, False),
        ({"roles": ["ps"]}, 5, False),
        ({"roles": ["worker"]}, 5, True),
        ({"onPodConditions": [{"type": "DisruptionTarget"}]}, 5, False),
        ({}, 5, True),
        ({"onExitCodes": {"operator": "In", "values": [5]}, "roles": ["ps"]}, 5, False),
    ],
)
def test_a_rule_matches_where_all_that_it_names_does(rule: dict[str, Any], code: int, matches: bool) -> None:
    world = own_world({"action": "FailJob", **rule}, restartBackoffSeconds=0).end(1, code).pass_time(3).settle()
    assert (world.condition("Failed")[0] == "True") is matches
    assert verdict(world).rule == ("rule 1" if matches else None)


def test_the_first_rule_that_matches_decides() -> None:
    world = own_world(
        {"name": "spot", "action": "RestartWithoutCounting", "onExitCodes": {"operator": "In", "values": [7]}},
        {"action": "FailJob"},
    )
    world.end(1, 7).pass_time(3)
    restart(world)
    assert (verdict(world).rule, world.job.status.restarts_since_checkpoint) == ("spot", 0)
    world.end(1, 8, at="2026-01-01T12:00:05Z").pass_time(9).settle()
    assert world.condition("Failed")[:2] == ("True", "RankFailed")


def test_restarts_that_do_not_count_pause_all_the_same() -> None:
    world = own_world({"action": "RestartWithoutCounting"}, maxRestarts=0)
    for _ in range(2):
        world.end(1, 137)
        restart(world)
    assert world.condition("Running")[1] == "BackingOff"
    reasons = [event.reason for event in world.events if event.warning]
    assert reasons == ["GangRestarted", "GangRestarted"], "with a pause before the next attempt and without"


def test_an_ignored_failure_leaves_the_others_alone() -> None:
    world = (
        own_world({"action": "Ignore", "onExitCodes": {"operator": "In", "values": [7]}})
        .end(2, 7)
        .pass_time(5)
        .settle()
    )
    assert world.condition("Running")[0] == "True"
    world.end(0, 0).end(1, 0).settle()
    assert world.condition("Complete") == ("True", "WorkersSucceeded", "all 2 workers succeeded")


@pytest.mark.parametrize(("policy", "log"), [({"failureLogInStatus": True}, "one\ntwo\nValueError: three"), ({}, None)])
def test_the_verdict_keeps_the_logs_end_where_the_job_asks_for_it(policy: dict[str, Any], log: str | None) -> None:
    world = own_world(**policy).end(1, 3, message="one\ntwo\nValueError: three\n").pass_time(3).settle()
    found = verdict(world)
    assert found.log == log
    assert (found.class_, found.exit_code, found.node) == ("Program", 3, "node1")


@pytest.mark.parametrize(
    ("policy", "last_line", "hinted"),
    [
        ({}, "PermissionError: [Errno 13] Permission denied: '/root/.cache'", True),
        ({}, "mkdir: cannot create directory '/data': Permission denied", True),
        ({"podSecurity": "Template"}, "PermissionError: [Errno 13] Permission denied: '/root/.cache'", False),
        ({}, "ValueError: no", False),
    ],
)
def test_a_denied_permission_names_the_switch_for_root(policy: dict[str, Any], last_line: str, hinted: bool) -> None:
    found = verdict(own_world(**policy).end(1, 1, message=f"{last_line}\n").pass_time(3).settle())
    assert ("`runPolicy.podSecurity: Template`" in found.message) == hinted
