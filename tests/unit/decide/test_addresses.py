"""A gang whose agents wait for the address of worker 0 does not run, and says so."""

from typing import Any

import pytest

from disttrain_api.names import ExitCode, Role
from disttrain_api.report import RankFailure
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.observed import Admission
from tests.builders import a_report, awaiting_address, merge, running, waiting
from tests.unit.decide.test_admission import a_gated
from tests.unit.decide.test_failures import verdict
from tests.unit.decide.test_queues import a_queued_world, let_go
from tests.unit.decide.world import World, a_running_world, a_world

SERVERS: dict[str, Any] = {
    "parallelism": {"dataParallel": {"mode": "ParameterServer"}},
    "parameterServers": {"replicas": 1},
}
POD = "digits-3f9a1-worker-{}-a1"
DNS = "check the cluster's DNS, and that the job's Service has an endpoint for worker 0"
OF_NODES = "worker 0 has found it: check the cluster's DNS on the nodes of these pods"


def awaits(world: World, *indices: int) -> World:
    """The containers of these pods run, and their agents find no address."""
    for index in indices:
        world.put(awaiting_address(world.pod(index), timestamp(world.now)))
    return world.settle()


def runs(world: World, *indices: int) -> World:
    """The agents of these pods have started their ranks."""
    for index in indices:
        world.put(running(world.pod(index)))
    return world.settle()


def three(**spec: Any) -> World:
    return a_world(**merge({"workers": {"replicas": 3}}, spec)).settle()


def test_containers_without_ranks_are_no_job_that_runs() -> None:
    world = awaits(three(), 0, 1, 2)
    assert world.condition("Running") == ("False", "WaitingForPods", "waiting for 3 pods to run")
    status = world.job.status
    assert (status.phase, status.ready, status.attempts[-1].running_time) == ("Starting", "0/3", None)
    runs(world, 0, 1)
    assert (world.condition("Running")[0], world.condition("Restarting")[0]) == ("False", "False")
    assert runs(world, 2).condition("Running")[:2] == ("True", "AllPodsRunning")
    assert world.job.status.ready == "3/3"


def test_a_start_without_delay_is_written_no_more_often_than_before() -> None:
    world, other = three(), three()
    runs(awaits(world, 0, 1, 2), 0, 1, 2)
    assert world.status_writes == other.run_all().status_writes


def test_after_a_while_the_condition_names_who_waits_since_when_and_what_to_do() -> None:
    world = awaits(three(), 0, 1, 2)
    since, at = timestamp(world.now), world.decide().requeue_at
    assert at is not None
    assert (at - world.now).total_seconds() == 20
    world.now = at
    status, reason, message = world.settle().condition("Running")
    assert (status, reason) == ("False", "WaitingForAddress")
    pods = ", ".join(POD.format(index) for index in range(3))
    assert message == (f"pods {pods} have waited for the address of worker 0 since {since}, and started no rank; {DNS}")
    assert [(event.reason, event.warning) for event in world.events][-1] == ("WaitingForAddress", True)
    writes = world.status_writes
    world.pass_time(100).settle()
    assert world.status_writes == writes, "time alone is no news"


def test_where_worker_0_has_its_address_the_nodes_of_the_others_are_named_as_the_place() -> None:
    world = runs(awaits(three(), 0, 1, 2), 0, 2).pass_time(20).settle()
    _, reason, message = world.condition("Running")
    assert reason == "WaitingForAddress"
    assert message.startswith(f"pod {POD.format(1)} has waited")
    assert message.endswith(OF_NODES)


def test_of_many_pods_three_are_named() -> None:
    world = awaits(a_world(workers={"replicas": 9}).settle(), *range(9)).pass_time(20).settle()
    message = world.condition("Running")[2]
    assert message.count("-worker-") == 3
    assert " and others have waited" in message


def test_a_pod_that_something_keeps_from_starting_is_what_the_others_wait_for() -> None:
    world = awaits(three(), 1, 2)
    world.put(waiting(world.pod(0), "ImagePullBackOff", "no such image"))
    assert world.pass_time(100).settle().condition("Running")[1] == "ImagePullBackOff"


def test_the_start_deadline_goes_on_and_says_what_was_waited_for() -> None:
    world = awaits(three(runPolicy={"startingDeadlineSeconds": 200}).pass_time(50), 0, 1, 2)
    assert world.pass_time(149).settle().condition("Failed")[0] == "False"
    status, reason, message = world.pass_time(1).settle().condition("Failed")
    assert (status, reason) == ("True", "WaitingForAddress")
    assert message.startswith("not all pods ran within startingDeadlineSeconds (200): pods digits-3f9a1-worker-0-a1, ")
    assert message.endswith(DNS)


def test_without_a_deadline_whoever_waits_for_an_address_goes_on_waiting() -> None:
    world = awaits(three(), 0, 1, 2).pass_time(10**6).settle()
    status, reason, message = world.condition("Running")
    assert (status, reason) == ("False", "WaitingForAddress")
    assert " since 2026-01-01T12:00:00Z, " in message
    assert world.decide().requeue_at is None


def test_worker_0_that_gives_up_is_the_cause_and_the_gang_restarts() -> None:
    world = awaits(three(), 0, 1, 2).pass_time(300).settle()
    code = ExitCode.NETWORK_FAULTY
    failure = RankFailure(rank=0, exit_code=code, reason="NetworkFaulty", message="digits has no address")
    world.end(0, code, report=a_report(failure=failure)).settle()
    world.pass_time(5).settle()
    assert verdict(world).reason == "NetworkFaulty"
    assert world.job.status.attempt == 2


def test_whoever_ends_without_a_word_while_another_waits_for_its_address_is_judged() -> None:
    world = runs(awaits(three(), 0, 1, 2), 0, 1)
    world.end(0, 1).settle().pass_time(5).settle()
    assert (verdict(world).pod, world.job.status.attempt) == (POD.format(0), 2)


def test_servers_run_when_their_containers_do() -> None:
    world = a_world(**SERVERS).settle()
    world.put(running(world.pod(0, Role.PS)))
    awaits(world, 0, 1)
    assert world.condition("Running")[0] == "False"
    assert runs(world, 0, 1).condition("Running")[:2] == ("True", "AllPodsRunning")


def test_another_operator_takes_over_the_same_wait() -> None:
    world = awaits(three(runPolicy={"startingDeadlineSeconds": 200}), 0, 1, 2).pass_time(30).settle()
    after = World(world.raw_job, world.now, dict(world.pods), services=set(world.services))
    assert after.settle().status_writes == 0
    assert after.pass_time(170).settle().condition("Failed")[:2] == ("True", "WaitingForAddress")


@pytest.mark.parametrize("probe", [None, {"exec": {"command": ["true"]}}, {"httpGet": {"port": 80}}])
def test_a_probe_of_the_template_or_of_none_says_nothing_of_ranks(probe: dict[str, Any] | None) -> None:
    world = three()
    for index in range(3):
        pod = awaiting_address(world.pod(index))
        pod["spec"]["containers"][0]["startupProbe"] = probe
        world.put(pod)
    assert world.settle().condition("Running")[:2] == ("True", "AllPodsRunning")


def test_in_a_queue_the_deadline_counts_from_when_it_let_the_pods_go() -> None:
    world = let_go(a_queued_world().pass_time(5000).settle())
    awaits(world, 0, 1).pass_time(59).settle()
    assert world.condition("Running")[1] == "WaitingForAddress"
    assert world.pass_time(1).settle().condition("Failed")[:2] == ("True", "WaitingForAddress")


def test_behind_the_gate_the_deadline_counts_from_the_release() -> None:
    gated = a_gated(startingDeadlineSeconds=100).wait(5000).let_go(0, 1)
    gated.pods = {index: awaiting_address(pod, timestamp(gated.now)) for index, pod in gated.pods.items()}
    gated.decide(Admission())
    gated.wait(99).decide(Admission())
    assert gated.running_reason()[0] == "WaitingForAddress"
    gated.run().decide(Admission())
    assert gated.running_reason()[0] == "AllPodsRunning"
    assert gated.raw["status"]["attempts"][-1]["admittedTime"] == "2026-01-01T13:23:20Z"


def test_behind_the_gate_the_start_ends_with_its_deadline() -> None:
    gated = a_gated(startingDeadlineSeconds=100).wait(5000).let_go(0, 1)
    gated.pods = {index: awaiting_address(pod, timestamp(gated.now)) for index, pod in gated.pods.items()}
    gated.wait(100).decide(Admission())
    assert gated.running_reason()[0] == "WaitingForAddress"
    assert gated.raw["status"]["phase"] == "Failed"


def test_a_pod_made_again_alone_that_waits_meets_its_deadline() -> None:
    rules = [{"action": "RestartPod", "onExitCodes": {"operator": "In", "values": [7]}}]
    policy = {"failurePolicy": {"rules": rules}, "startingDeadlineSeconds": 100}
    world = a_running_world(**SERVERS, runPolicy=policy)
    world.end(1, 7).settle().confirm_deletions().settle()
    awaits(world, 1)
    assert world.pass_time(100).settle().condition("Failed")[:2] == ("True", "StartingDeadlineExceeded")
