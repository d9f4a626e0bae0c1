"""Pods that their node ends or never starts: whose fault that is, what counts, and which node is suspected."""

from typing import Any

import pytest

from disttrain_api.status import Verdict
from tests.builders import an_init_status, ended, initializing, with_state
from tests.unit.decide.world import World, a_running_world, a_world

Raw = dict[str, Any]
POD = "worker 0 (pod digits-3f9a1-worker-0-a1 on node node1)"


def verdict_after(world: World) -> Verdict:
    """The verdict over the first attempt, once it is judged."""
    world.pass_time(5).settle()
    verdict = world.job.status.attempts[0].verdict
    assert verdict is not None
    return verdict


# --- the job's own limits ---

OWN_LIMITS = {
    "emptyDir": 'Usage of EmptyDir volume "cache" exceeds the limit "33Mi". ',
    "container": 'Container trainer exceeded its local ephemeral storage limit "5Gi". ',
    "pod": "Pod ephemeral local storage usage exceeds the total limit of containers 5Gi. ",
}


def evicted(pod: Raw, message: str, code: int = 137, target: bool = False, at: str = "2026-01-01T12:00:00Z") -> Raw:
    """The pod as the kubelet reports it after an eviction. `target`: for the node's sake."""
    pod = ended(pod, code, at=at)
    pod["status"] |= {"phase": "Failed", "reason": "Evicted", "message": message}
    if target:
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": message}
        pod["status"]["conditions"] = [condition]
    return pod


def evict(world: World, *, index: int = 0, **how: Any) -> World:
    world.put(evicted(world.pod(index), **{"message": OWN_LIMITS["emptyDir"], **how}))
    return world


@pytest.mark.parametrize("message", OWN_LIMITS.values(), ids=OWN_LIMITS.keys())
def test_an_eviction_for_the_pods_own_limit_is_the_jobs_and_counted(message: str) -> None:
    world = evict(a_running_world(), message=message)
    verdict = verdict_after(world)
    assert (verdict.class_, verdict.reason, verdict.action) == ("OutOfStorage", "StorageLimitExceeded", "RestartGang")
    assert verdict.message == f"{POD} was evicted for using more storage than it may (exit code 137): {message.strip()}"
    assert world.job.status.restarts_since_checkpoint == 1


def test_a_program_that_ended_well_when_it_was_evicted_has_not_succeeded() -> None:
    verdict = verdict_after(evict(a_running_world(), code=0))
    assert (verdict.reason, verdict.exit_code) == ("StorageLimitExceeded", None)
    assert verdict.message == f"{POD} was evicted for using more storage than it may: {OWN_LIMITS['emptyDir'].strip()}"


def test_it_ends_the_job_when_no_restart_is_left_and_no_node_is_suspected() -> None:
    world = a_running_world(runPolicy={"maxRestarts": 2, "restartBackoffSeconds": 0})
    for _ in range(3):
        evict(world).pass_time(5).settle().confirm_deletions().settle().run_all()
    assert world.condition("Failed")[:2] == ("True", "RestartsExhausted")
    assert 'Usage of EmptyDir volume "cache" exceeds the limit "33Mi"; maxRestarts (2)' in world.condition("Failed")[2]
    assert [attempt.avoided_nodes for attempt in world.job.status.attempts] == [[], [], []]


def test_it_is_the_cause_where_a_peer_fails_for_it_before() -> None:
    world = evict(a_running_world(), at="2026-01-01T12:00:09Z")
    world.end(1, 1, message="RuntimeError: lost them", at="2026-01-01T12:00:02Z")
    assert verdict_after(world).reason == "StorageLimitExceeded"


@pytest.mark.parametrize(("reason", "matches"), [("StorageLimitExceeded", True), ("Evicted", False)])
def test_a_rule_tells_it_from_an_eviction_for_the_nodes_sake(reason: str, matches: bool) -> None:
    rules = [{"action": "RestartWithoutCounting", "reasons": [reason]}]
    world = evict(a_running_world(runPolicy={"failurePolicy": {"rules": rules}}))
    assert (verdict_after(world).rule == "rule 1") is matches


def test_an_eviction_for_the_nodes_sake_is_not_the_jobs() -> None:
    low = "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 3Mi. "
    world = evict(a_running_world(), message=low, target=True)
    verdict = verdict_after(world)
    assert (verdict.class_, verdict.reason, verdict.action) == ("Disruption", "Evicted", "RestartWithoutCounting")
    assert world.job.status.restarts_since_checkpoint == 0


def test_an_init_container_may_use_too_much_as_well() -> None:
    world = a_world().settle()
    killed = {"terminated": {"exitCode": 137, "reason": "Error", "finishedAt": "2026-01-01T12:00:00Z"}}
    pod = initializing(world.pod(0), an_init_status("fetch", killed), phase="Failed")
    pod["status"] |= {"reason": "Evicted", "message": OWN_LIMITS["emptyDir"]}
    world.put(pod)
    verdict = verdict_after(world)
    assert verdict.reason == "StorageLimitExceeded"
    assert verdict.message.startswith(f"init container fetch of {POD} was evicted for using more storage than it may")


# --- what a kubelet refuses ---

REFUSALS = {
    "OutOfcpu": "Node didn't have enough resource: cpu, requested: 4000, used: 3950, capacity: 4000",
    "OutOfexample.com/gpu": "Node didn't have enough resource: example.com/gpu, requested: 8, used: 1, capacity: 8",
    "UnexpectedAdmissionError": "Allocate failed due to requested number of devices unavailable for example.com/gpu",
    "TopologyAffinityError": "Resources cannot be allocated with Topology locality",
    "NodeAffinity": "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
    "NodeShutdown": "Pod was rejected as the node is shutting down.",
    "Evicted": "The node had condition: [DiskPressure]. ",
}


def refused(world: World, reason: str, message: str) -> World:
    """A kubelet does not take worker 0: the status has none of its containers."""
    pod = world.pod(0)
    status = {"phase": "Failed", "reason": reason, "message": f"Pod was rejected: {message}"}
    world.put({**pod, "spec": {**pod["spec"], "nodeName": "node1"}, "status": status})
    return world


@pytest.mark.parametrize(("reason", "message"), REFUSALS.items(), ids=REFUSALS.keys())
def test_a_pod_that_its_node_does_not_take_is_no_failure_of_the_jobs(reason: str, message: str) -> None:
    world = refused(a_world().settle(), reason, message)
    verdict = verdict_after(world)
    assert (verdict.class_, verdict.reason) == ("Disruption", "Rejected")
    assert verdict.action == "RestartWithoutCounting"
    assert verdict.message == f"{POD} was rejected by its node ({reason}): {message.strip()}"
    assert (world.job.status.restarts, world.job.status.restarts_since_checkpoint) == (1, 0)


def test_a_node_that_takes_no_pods_is_avoided_and_tries_are_paused() -> None:
    world = a_world(runPolicy={"restartBackoffSeconds": 20}).settle()
    for pause in (0, 20, 40):
        refused(world, "OutOfcpu", REFUSALS["OutOfcpu"]).settle().confirm_deletions().settle()
        assert len(world.pods) == (0 if pause else 2)
        world.pass_time(pause).settle()
        assert len(world.pods) == 2
    assert [attempt.avoided_nodes for attempt in world.job.status.attempts] == [[], [], ["node1"], ["node1"]]


def test_rules_see_the_kubelets_own_reason() -> None:
    rules = [{"action": "FailJob", "reasons": ["OutOfcpu"]}]
    world = refused(a_world(runPolicy={"failurePolicy": {"rules": rules}}).settle(), "OutOfcpu", "")
    assert verdict_after(world).action == "FailJob"


def test_what_every_node_would_refuse_is_counted() -> None:
    world = refused(a_world().settle(), "SysctlForbidden", 'forbidden sysctl: "kernel.msgmax" not allowlisted')
    verdict = verdict_after(world)
    assert (verdict.reason, verdict.action) == ("SysctlForbidden", "RestartGang")
    sentence = 'forbidden sysctl: "kernel.msgmax" not allowlisted'
    assert verdict.message.endswith(f"was ended by the cluster (SysctlForbidden): {sentence}")


@pytest.mark.parametrize("which", ["init container", "further container"])
def test_a_pod_of_which_anything_has_run_was_taken(which: str) -> None:
    world = a_world().settle()
    ran = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": "2026-01-01T12:00:00Z"}}
    if which == "init container":
        pod = initializing(world.pod(0), an_init_status("unpack", ran), phase="Failed")
    else:
        pod = with_state(world.pod(0), "Failed", {"waiting": {"reason": "ContainerCreating"}})
        pod["status"]["containerStatuses"].append({"name": "shipper", "state": ran})
    pod["status"] |= {"reason": "Evicted", "message": OWN_LIMITS["pod"]}
    world.put(pod)
    assert verdict_after(world).reason == "StorageLimitExceeded"


# --- memory ---

OWN, OTHER, POD_LIMIT = ({"resources": {"limits": {"memory": limit}}} for limit in ("77Mi", "5Gi", "9Gi"))


@pytest.mark.parametrize(
    ("spec", "suffix"),
    [
        ({"containers": [{"name": "proxy", **OTHER}, {"name": "trainer", **OWN}], **POD_LIMIT}, " (memory limit 77Mi)"),
        ({"containers": [{"name": "proxy", **OTHER}, {"name": "trainer"}], **POD_LIMIT}, " (memory limit 9Gi)"),
        ({"containers": [{"name": "proxy", **OTHER}, {"name": "trainer", "resources": {}}]}, ""),
    ],
    ids=["container", "pod", "none"],
)
def test_memory_that_ran_out_is_named_with_the_limit_that_held(spec: Raw, suffix: str) -> None:
    world = a_running_world()
    pod = ended(world.pod(0), 137, reason="OOMKilled")
    world.put({**pod, "spec": {**pod["spec"], **spec}})
    assert verdict_after(world).message == f"{POD} ran out of memory and was killed{suffix}"


def test_the_memory_limit_of_an_init_container_is_its_own() -> None:
    world = a_world().settle()
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T12:00:00Z"}}
    pod = initializing(world.pod(0), an_init_status("fetch", killed), phase="Failed")
    pod["spec"] |= {"initContainers": [{"name": "fetch", **OWN}], "containers": [{"name": "trainer", **OTHER}]}
    world.put(pod)
    sentence = "ran out of memory and was killed (memory limit 77Mi)"
    assert verdict_after(world).message == f"init container fetch of {POD} {sentence}"
