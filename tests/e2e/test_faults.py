"""What a cluster does to a job: memory, drains, preemption, quotas, a dead operator."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.documented import console_commands
from tests.e2e.conftest import SYSTEM, TRAINER_IMAGE
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import APART, NO_CHECKPOINT_SOON, WITH_SLOW_DATA, long_job, program
from tests.e2e.observe import checkpoint, end_soon, first_step, saved_step, train_until_a_checkpoint, verdict
from tools.cluster.paths import REPOSITORY

SLOT = "example.com/slot"


def test_a_pod_that_runs_out_of_memory_is_named(kubectl: Kubectl) -> None:
    eat = {
        "name": "trainer",
        "image": TRAINER_IMAGE,
        "command": ["python3", "-c", "import os; import time; time.sleep(3)\nx = b'x' * (1 << 30)"],
        "resources": {"limits": {"memory": "64Mi"}},
    }
    workers = {"replicas": 1, "template": {"spec": {"containers": [eat]}}}
    kubectl.apply(program("oom", "", TRAINER_IMAGE, replicas=1, workers=workers, runPolicy={"maxRestarts": 1}))
    kubectl.wait("Finished", "oom")
    failed = kubectl.condition("oom", "Failed")
    assert failed["reason"] == "RestartsExhausted", kubectl.describe_job("oom")
    assert "ran out of memory" in failed["message"]
    (command,) = console_commands(REPOSITORY / "docs" / "failures.md")
    first = json.loads(kubectl(*shlex.split(command)[1:]))
    assert (first["class"], first["reason"], first["action"]) == ("OutOfMemory", "OOMKilled", "RestartGang")


def test_a_drain_ends_in_a_checkpoint_and_costs_no_restart(kubectl: Kubectl) -> None:
    kubectl.apply(
        long_job("drained", workers={"template": APART}, runPolicy={"maxRestarts": 0}, training=NO_CHECKPOINT_SOON)
    )
    first_step(kubectl, "drained", attempt=1)
    victim = kubectl.pods("drained")[1]
    node = victim["spec"]["nodeName"]
    try:
        drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force")
        kubectl(*drain, "--pod-selector=disttrain.io/job-name=drained", "--timeout=200s", timeout=250)
        found = verdict(kubectl, "drained")
        assert (found["class"], found["reason"]) == ("Disruption", "Drained"), kubectl.describe_job("drained")
        saved = saved_step(kubectl, "drained")
        kubectl.wait("Running", "drained")
        assert saved < first_step(kubectl, "drained", attempt=2) <= saved + 20
        assert {pod["spec"]["nodeName"] for pod in kubectl.pods("drained")}.isdisjoint({node})
        status = kubectl.status("drained")
        assert (status["restarts"], status["restartsSinceCheckpoint"]) == (1, 0)
    finally:
        kubectl("uncordon", node)
    end_soon(kubectl, "drained")


def test_a_drain_of_one_pod_of_a_job_in_place_ends_in_a_checkpoint_of_all(kubectl: Kubectl) -> None:
    """Red where the ranks of the other pod end before all have written one."""
    in_place = {"restartStrategy": "InPlace", "maxRestarts": 0}
    kubectl.apply(long_job("leaves", workers={"template": APART}, runPolicy=in_place, training=NO_CHECKPOINT_SOON))
    first_step(kubectl, "leaves", attempt=1)
    stays, victim = kubectl.pods("leaves")
    node = victim["spec"]["nodeName"]
    try:
        drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force")
        kubectl(*drain, "--pod-selector=disttrain.io/job-name=leaves", "--timeout=200s", timeout=250)
        saved = saved_step(kubectl, "leaves")
        name = stays["metadata"]["name"]
        resumed = kubectl.wait_for_log(name, rf"resuming after step {saved} ", job="leaves")
        assert resumed
        status = kubectl.status("leaves")
        assert (status["attempt"], status["restarts"], status["restartsSinceCheckpoint"]) == (1, 1, 0)
        assert [pod["metadata"]["uid"] for pod in kubectl.pods("leaves") if pod["metadata"]["name"] == name] == [
            stays["metadata"]["uid"]
        ]
    finally:
        kubectl("uncordon", node)
    end_soon(kubectl, "leaves")


@pytest.fixture
def slots(kubectl: Kubectl) -> Iterator[None]:
    """Every node has one slot, and there are two priorities."""

    def patch(operation: dict[str, Any]) -> None:
        for node in kubectl.get("nodes")["items"]:
            change = json.dumps([{**operation, "path": f"/status/capacity/{SLOT.replace('/', '~1')}"}])
            kubectl("patch", "node", node["metadata"]["name"], "--subresource=status", "--type=json", "-p", change)

    patch({"op": "add", "value": "1"})
    for name, value in (("test-low", 1), ("test-high", 1000)):
        kubectl("create", "priorityclass", name, f"--value={value}")
    kubectl.until(lambda: all(SLOT in node["status"]["allocatable"] for node in kubectl.get("nodes")["items"]), "slots")
    yield
    for name in ("test-low", "test-high"):
        kubectl("delete", "priorityclass", name)
    patch({"op": "remove"})


def test_preemption_costs_no_restart_and_the_job_comes_back(kubectl: Kubectl, slots: None) -> None:
    container = {**WITH_SLOW_DATA["spec"]["containers"][0], "resources": {"limits": {SLOT: 1}}}
    template = {"spec": {"containers": [container], "priorityClassName": "test-low"}}
    kubectl.apply(
        long_job("preempted", workers={"template": template}, runPolicy={"maxRestarts": 0}, training=NO_CHECKPOINT_SOON)
    )
    first_step(kubectl, "preempted", attempt=1)
    greedy = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "greedy"},
        "spec": {
            "priorityClassName": "test-high",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "main",
                    "image": TRAINER_IMAGE,
                    "command": ["sleep", "600"],
                    "resources": {"limits": {SLOT: 1}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }
    kubectl.apply(greedy)
    found = verdict(kubectl, "preempted")
    assert (found["class"], found["reason"]) == ("Disruption", "Preempted"), kubectl.describe_job("preempted")
    kubectl.until(
        lambda: kubectl.condition("preempted", "Running")["reason"] == "Unschedulable", "why it waits", job="preempted"
    )
    assert SLOT in kubectl.condition("preempted", "Running")["message"]
    saved = saved_step(kubectl, "preempted")
    kubectl("delete", "pod", "greedy")
    kubectl.wait("Running", "preempted")
    assert saved < first_step(kubectl, "preempted", attempt=2) <= saved + 20
    assert kubectl.status("preempted")["restartsSinceCheckpoint"] == 0
    end_soon(kubectl, "preempted")


def test_pods_killed_as_a_whole_are_replaced_also_where_the_operator_is_killed_in_mid_restart(kubectl: Kubectl) -> None:
    kubectl.apply(long_job("headless", training={"steps": 800}))
    step = train_until_a_checkpoint(kubectl, "headless")
    for attempt, with_operator in ((2, False), (3, True)):
        kubectl("delete", "pod", kubectl.pods("headless")[1]["metadata"]["name"], "--grace-period=0", "--force")
        if with_operator:
            kubectl.run("delete", "pod", "-n", SYSTEM, "--all", "--grace-period=0", "--force", timeout=150)
        kubectl.wait_for(f"{{.status.attempt}}={attempt}", "headless")
        kubectl.wait("Running", "headless")
        begun = first_step(kubectl, "headless", attempt)
        assert begun >= step
        step = checkpoint(kubectl, "headless", begun)
    kubectl.wait("Finished", "headless", patience=400)
    status = kubectl.status("headless")
    assert kubectl.condition("headless", "Complete")["status"] == "True", kubectl.describe_job("headless")
    found = (status["restarts"], status["attempt"], len(status["attempts"]), status["progress"]["step"])
    assert found == (2, 3, 3, 800)
