"""An attempt that never ran has one cause, what kept its unstarted members: the others' ends are symptoms."""

from typing import Any

import pytest

from disttrain_api.names import ExitCode, Role
from disttrain_api.report import FailureSignature, RankFailure
from disttrain_api.status import ConditionType
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.conditions import condition
from disttrain_operator.decide.observed import CreateProblem, PodEvent
from tests.builders import NOW, a_report, running, waiting, with_state
from tests.unit.decide.test_failures import COMMAND, OWN, verdict
from tests.unit.decide.world import World, a_world

NO_ROOM = "0/5 nodes are available: 5 Insufficient cpu."
LAST_WORDS = "TimeoutError: where are the others?"


def unplaced(world: World, index: int, message: str = NO_ROOM) -> World:
    """The scheduler has no node for the pod."""
    pod = world.pod(index)
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    world.put({**pod, "status": {"phase": "Pending", "conditions": [refused]}})
    return world


def give_up(world: World, *indices: int, code: int = 1, **how: Any) -> World:
    """These pods start, wait for the others, and end."""
    for index in indices:
        world.put(running(world.pod(index)))
        world.settle()
    for index in indices:
        world.end(index, code, at=timestamp(world.now), **({"message": LAST_WORDS} | how))
    return world.settle()


def begun(*rules: dict[str, Any], **policy: Any) -> World:
    """Three pods, made and not started."""
    run_policy = {**({"failurePolicy": {"rules": list(rules)}} if rules else {}), **policy}
    return a_world(**OWN, runPolicy=run_policy).settle()


def again(world: World) -> World:
    """The pods of the attempt that ended go, and those of the next one come, after a pause where there is one."""
    world.settle().confirm_deletions().settle()
    while not world.pods and world.condition("Finished")[0] == "False":
        at = world.decide().requeue_at
        assert at is not None
        world.now = at
        world.settle()
    return world


def test_who_gives_up_waiting_for_a_pod_without_a_node_is_a_symptom_and_not_counted() -> None:
    world = give_up(unplaced(begun(maxRestarts=0), 2), 0, 1)
    found = verdict(world)
    assert (found.reason, found.class_, found.action) == ("Unschedulable", "NotStarted", "RestartWithoutCounting")
    assert found.message == (
        f"pod digits-3f9a1-worker-2-a1: {NO_ROOM[:-1]}; wait for room, or ask for fewer or smaller pods; meanwhile "
        f"worker 0 (pod digits-3f9a1-worker-0-a1 on node node1) exited with code 1: TimeoutError (its log says more)"
    )
    assert (found.pod, found.node, found.exit_code) == (None, None, None)
    status = world.job.status
    assert (status.attempt, status.restarts_since_checkpoint) == (2, 0)


def test_the_job_fails_at_one_start_deadline_with_the_reason_and_no_node_is_suspected() -> None:
    world = begun(maxRestarts=1, restartBackoffSeconds=1, startingDeadlineSeconds=700)
    began, attempts = world.now, 0
    while world.condition("Finished")[0] == "False":
        give_up(unplaced(world, 2).pass_time(20), 0, 1)
        attempts += 1
        assert all(not attempt.avoided_nodes for attempt in world.job.status.attempts)
        again(world)
    assert attempts > 5
    assert 700 <= (world.now - began).total_seconds() <= 720
    status, reason, message = world.condition("Failed")
    assert (status, reason) == ("True", "Unschedulable")
    assert message.startswith("not all pods ran within startingDeadlineSeconds (700): pod digits-3f9a1-worker-2-a")
    assert NO_ROOM[:-1] in message


def test_without_a_deadline_a_start_goes_on_and_costs_no_restart_however_often_it_is_tried() -> None:
    world = begun(maxRestarts=0)
    for _ in range(20):
        again(give_up(unplaced(world, 2).pass_time(600), 0, 1))
        again(reject(world.pass_time(600)))
    unplaced(world, 2).settle().pass_time(30 * 86_400).settle()
    running = condition(world.job.status, ConditionType.RUNNING)
    assert (running.status, running.reason, running.last_transition_time) == ("False", "Unschedulable", timestamp(NOW))
    assert NO_ROOM[:-1] in running.message
    assert (world.job.status.restarts, world.job.status.restarts_since_checkpoint) == (40, 0)


def test_a_pause_ends_with_the_deadline() -> None:
    world = begun(restartBackoffSeconds=300, startingDeadlineSeconds=100)
    for _ in range(2):
        give_up(unplaced(world.pass_time(20), 2), 0, 1).confirm_deletions().settle()
    assert world.condition("Running")[1] == "BackingOff"
    assert NO_ROOM[:-1] in world.condition("Running")[2]
    at = world.decide().requeue_at
    assert at is not None
    world.now = at
    assert world.settle().condition("Failed")[:2] == ("True", "Unschedulable")


def test_what_takes_its_usual_course_at_the_deadline_hides_no_reason_of_the_same_start() -> None:
    world = again(give_up(unplaced(begun(startingDeadlineSeconds=300), 2), 0, 1))
    for index in range(3):
        world.put(with_state(world.pod(index), "Pending", {"waiting": {"reason": "ContainerCreating"}}))
    world.pod_event = PodEvent(world.pod(2)["metadata"]["uid"], "Pulling", 'Pulling image "registry/large:1"')
    assert world.settle().condition("Running")[1] == "Pulling"
    status, reason, message = world.pass_time(300).settle().condition("Failed")
    assert (status, reason) == ("True", "Unschedulable")
    assert NO_ROOM[:-1] in message


def test_more_attempts_than_a_status_keeps_are_still_one_start() -> None:
    world = begun(restartBackoffSeconds=0, startingDeadlineSeconds=1000)
    for _ in range(14):
        give_up(unplaced(world, 2).pass_time(60), 0, 1)
        again(world)
    assert [attempt.number for attempt in world.job.status.attempts] == [1, *range(7, 16)]
    unplaced(world, 2).pass_time(159).settle()
    assert world.condition("Failed")[0] == "False"
    assert world.pass_time(1).settle().condition("Failed")[:2] == ("True", "Unschedulable")


def reject(world: World) -> World:
    """The node of worker 0 does not take it."""
    pod = world.pod(0)
    status = {"phase": "Failed", "reason": "OutOfcpu", "message": "Pod was rejected: Node didn't have enough resource"}
    world.put({**pod, "spec": {**pod["spec"], "nodeName": "node1"}, "status": status})
    return world.settle().pass_time(3).settle()


def test_attempts_that_a_disruption_ends_before_they_ran_are_one_start_with_one_deadline() -> None:
    world = begun(restartBackoffSeconds=0, startingDeadlineSeconds=700)
    began = world.now
    while world.condition("Finished")[0] == "False":
        again(reject(world.pass_time(100)))
    assert 700 <= (world.now - began).total_seconds() <= 820
    status, reason, message = world.condition("Failed")
    assert (status, reason) == ("True", "Rejected")
    assert message.startswith("not all pods ran within startingDeadlineSeconds (700): ")


def test_a_lost_node_and_a_pod_without_a_node_are_one_start() -> None:
    world = again(reject(begun(startingDeadlineSeconds=300).pass_time(100)))
    world = again(give_up(unplaced(world, 2).pass_time(50), 0, 1))
    left = 300 - (world.now - NOW).total_seconds()
    world.pass_time(left - 1).settle()
    assert world.condition("Failed")[0] == "False"
    assert world.pass_time(1).settle().condition("Failed")[:2] == ("True", "Unschedulable")


def test_a_disruption_of_a_gang_that_ran_begins_another_start() -> None:
    world = begun(restartBackoffSeconds=0, startingDeadlineSeconds=100).run_all().pass_time(5000)
    again(reject(world)).pass_time(90).settle()
    assert world.condition("Failed")[0] == "False"


def test_a_gang_that_has_run_begins_another_start() -> None:
    world = give_up(unplaced(begun(restartBackoffSeconds=0, startingDeadlineSeconds=100), 2).pass_time(90), 0, 1)
    again(world).run_all()
    assert world.condition("Running")[:2] == ("True", "AllPodsRunning")
    world.pass_time(1000).end(0, 137).settle()
    again(world).pass_time(99).settle()
    assert world.condition("Failed")[0] == "False"
    assert world.job.status.restarts_since_checkpoint == 1


def test_a_job_that_is_resumed_begins_another_start() -> None:
    world = begun(restartBackoffSeconds=300, startingDeadlineSeconds=100)
    for _ in range(2):
        give_up(unplaced(world.pass_time(20), 2), 0, 1).confirm_deletions().settle()
    world.edit(suspend=True).settle().pass_time(10_000).edit(suspend=False).settle()
    assert world.condition("Failed")[0] == "False"
    world.pass_time(99).settle()
    assert world.condition("Failed")[0] == "False"
    world.pass_time(1).settle()
    assert world.condition("Failed")[:2] == ("True", "StartingDeadlineExceeded"), "what was before the pause is over"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (lambda world: world.put(waiting(world.pod(2), "ErrImagePull")), "ImagePullBackOff"),
        (lambda world: world.put(waiting(world.pod(2), "CreateContainerConfigError")), "CreateContainerConfigError"),
        (lambda world: unplaced(world, 2, "pod has unbound immediate PersistentVolumeClaims"), "VolumeNotBound"),
        (lambda world: refuse(world, 2), "QuotaExceeded"),
    ],
)
def test_whatever_keeps_a_member_is_the_cause(how: Any, reason: str) -> None:
    world = begun(maxRestarts=0, startingDeadlineSeconds=300)
    for index in (0, 1):
        world.put(running(world.pod(index)))
    how(world)
    world.settle()
    world.end(0, 1).end(1, 1)
    world.settle() if not world.problems else world.step()
    assert (verdict(world).reason, verdict(world).class_) == (reason, "NotStarted")
    assert world.job.status.restarts_since_checkpoint == 0


def refuse(world: World, index: int) -> None:
    """The quota has no room for the pod."""
    name = world.pod(index)["metadata"]["name"]
    world.remove(name, remembered=False)
    world.problems = [CreateProblem("Pod", name, 403, "QuotaExceeded", "exceeded quota: small")]
    world.settle = lambda rounds=20: world  # type: ignore[method-assign] # it is asked for again and again


def test_a_pod_that_fails_while_the_others_are_about_to_start_is_judged_when_they_have() -> None:
    world = give_up(begun(), 0)
    assert world.job.status.attempt == 1
    assert world.condition("Running") == (
        "False",
        "WaitingForPods",
        "waiting for 3 pods to run; pod digits-3f9a1-worker-0-a1 has failed before all had started",
    )
    for index in (1, 2):
        world.put(running(world.pod(index)))
    world.settle().pass_time(3).settle()
    assert (verdict(world).class_, verdict(world).pod) == ("Program", "digits-3f9a1-worker-0-a1")
    assert world.job.status.restarts_since_checkpoint == 1


def test_a_pod_whose_loss_is_ignored_is_named_while_the_others_are_waited_for() -> None:
    world = begun({"action": "Ignore"})
    world.put(running(world.pod(0))).settle().drain(0, "DeletionByTaintManager", ready=False).settle()
    failed = "pod digits-3f9a1-worker-0-a1 has failed before all had started"
    assert world.condition("Running")[1:] == ("WaitingForPods", f"waiting for 3 pods to run; {failed}")


def test_pods_that_never_give_a_reason_fail_the_job_at_the_deadline_whoever_failed_before() -> None:
    world = give_up(begun(startingDeadlineSeconds=60), 0).pass_time(60).settle()
    assert world.condition("Failed")[:2] == ("True", "StartingDeadlineExceeded")
    assert "digits-3f9a1-worker-1-a1" in world.condition("Failed")[2]


@pytest.mark.parametrize(
    ("code", "class_"), [(ExitCode.DATA_NOT_FOUND, "Configuration"), (ExitCode.PORT_IN_USE, "Program")]
)
def test_an_end_whose_own_cause_is_known_stays_the_cause(code: ExitCode, class_: str) -> None:
    world = a_world(workers={"replicas": 3}).settle()
    failure = RankFailure(rank=0, exit_code=code, message="found before anybody was waited for")
    give_up(unplaced(world, 2), 0, code=code, report=a_report(0, failure=failure)).pass_time(3).settle()
    assert verdict(world).class_ == class_
    assert world.job.status.restarts_since_checkpoint == (class_ == "Program")


def test_an_exception_of_the_trainer_that_would_come_again_stays_the_cause() -> None:
    world = a_world(workers={"replicas": 3}).settle()
    place = FailureSignature(error="TypeError", place="model.py:3", step=0, steps_done=0)
    failure = RankFailure(rank=0, exit_code=1, message="TypeError: no", signature=place)
    give_up(unplaced(world, 2), 0, code=1, report=a_report(0, failure=failure)).pass_time(3).settle()
    assert (verdict(world).class_, verdict(world).action) == ("Program", "RestartGang")


@pytest.mark.parametrize("code", [ExitCode.PEER_LOST, ExitCode.STOPPED])
def test_a_trainer_that_lost_who_never_came_is_a_symptom_and_nothing_else_is_waited_for(code: ExitCode) -> None:
    world = a_world(workers={"replicas": 3}).settle()
    failure = RankFailure(rank=0, exit_code=code, message="3 ranks did not meet within 600 s")
    give_up(unplaced(world, 2), 0, 1, code=code, report=a_report(0, failure=failure))
    assert (verdict(world).reason, world.job.status.restarts_since_checkpoint) == ("Unschedulable", 0)


def test_a_pod_that_is_killed_while_another_has_no_node_is_a_cause() -> None:
    world = give_up(unplaced(begun(), 2), 0, code=137)
    assert (verdict(world).class_, world.job.status.restarts_since_checkpoint) == ("Killed", 1)


def test_a_job_that_may_not_restart_fails_with_what_kept_the_others() -> None:
    world = give_up(unplaced(begun(restartPolicy="Never"), 2), 0, 1)
    assert world.condition("Failed")[:2] == ("True", "Unschedulable")


def test_a_rule_of_ones_own_decides_about_the_gang() -> None:
    world = give_up(unplaced(begun({"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}}), 2), 0, 1)
    world.pass_time(3).settle()
    assert world.condition("Failed")[:2] == ("True", "RankFailed")


def test_a_single_pod_that_gave_up_is_no_restart_of_its_own_before_all_have_started() -> None:
    world = give_up(unplaced(begun({"action": "RestartPod"}, maxRestarts=0), 2), 0)
    assert (verdict(world).reason, world.job.status.restarts_since_checkpoint) == ("Unschedulable", 0)
    world = give_up(begun({"action": "RestartPod"}), 0)
    assert (world.job.status.restarts, len(world.pods)) == (0, 3)
    for index in (1, 2):
        world.put(running(world.pod(index)))
    world.settle()
    assert (world.job.status.attempt, world.job.status.restarts) == (1, 1)


def test_a_server_that_has_no_node_is_what_its_workers_waited_for() -> None:
    world = a_world(**OWN, parameterServers={"replicas": 1, "template": COMMAND}).settle()
    server = world.pod(0, Role.PS)
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_ROOM}
    world.put({**server, "status": {"phase": "Pending", "conditions": [refused]}})
    give_up(world, 0, 1, 2)
    assert (verdict(world).reason, world.job.status.restarts_since_checkpoint) == ("Unschedulable", 0)


def queue(world: World) -> World:
    """The pods that were just made are held by Kueue for a long time."""
    world.step()
    for pod in list(world.pods.values()):
        held = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
        pod["metadata"]["labels"] |= {"kueue.x-k8s.io/managed": "true", "kueue.x-k8s.io/queue-name": "research"}
        world.put({**pod, "status": {"phase": "Pending", "conditions": [held]}})
    world.settle().pass_time(5000).settle()
    assert world.condition("Running")[1] == "Queued"
    for index in range(3):
        unplaced(world, index)
    return world.settle()


@pytest.mark.parametrize(
    ("end", "seconds", "left"),
    [(reject, 20, 19), (lambda world: give_up(world, 0, 1), 24, 3)],
    ids=["its node does not take it", "peers give up"],
)
def test_time_in_a_queue_of_kueue_counts_for_no_start(end: Any, seconds: int, left: int) -> None:
    policy = {"gangScheduler": "Kueue", "queueName": "research"}
    policies = {"schedulingPolicy": policy, "startingDeadlineSeconds": 100, "restartBackoffSeconds": 0}
    world = a_world(**OWN, runPolicy=policies)
    for _ in range(4):
        end(queue(world).pass_time(seconds)).confirm_deletions()
    queue(world).pass_time(left).settle()
    assert (world.job.status.attempt, world.condition("Failed")[0]) == (5, "False")
    assert world.pass_time(1).settle().condition("Failed")[0] == "True"
