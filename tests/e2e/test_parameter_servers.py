"""A job with parameter servers on a real cluster: a server, the manager and a worker are killed; nobody else stops."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.builders import merge
from tests.cluster.full import kubeconfig_path
from tests.e2e.conftest import cluster_command
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import MODEL, SLOW_DATA, STORAGE, WITH_SLOW_DATA, job
from tests.e2e.observe import checkpoints

STEPS = 1_500
AGAIN = r"goes on from its snapshot after \d+ updates, in life 2"
# By what was made again.
SAID = {("ps", "1"): (AGAIN,), ("ps", "0"): (AGAIN, "has heard 2 workers and goes on after step")}
SPEC: dict[str, Any] = {
    "workers": {"replicas": 2, "template": WITH_SLOW_DATA},
    "parameterServers": {"replicas": 2, "template": WITH_SLOW_DATA},
    "storage": STORAGE,
    "parallelism": {
        "dataParallel": {"mode": "ParameterServer", "parameterServer": {"synchronization": "Async"}},
    },
    "runPolicy": {"maxRestarts": 3, "failurePolicy": {"rules": [{"name": "alone", "action": "RestartPod"}]}},
    "training": {
        "model": MODEL,
        "data": SLOW_DATA,
        "optimizer": {"name": "SGD", "learningRate": 0.05},
        "steps": STEPS,
        "globalBatchSize": 32,
        "checkpoint": {"interval": 50, "keepLatest": 2},
        "logging": {"interval": 100},
    },
}


def test_servers_manager_and_worker_are_replaced_one_by_one(kubectl: Kubectl) -> None:
    kubectl.apply(job("async", SPEC))
    kubectl.wait("Running", "async")
    killed = []
    for role, index in (("ps", "1"), ("ps", "0"), ("worker", "1")):
        before = newest(kubectl)
        kubectl.until(lambda before=before: newest(kubectl) > before, "a further checkpoint", job="async")
        victim = pod(kubectl, role, index)
        killed.append(victim["metadata"]["name"])
        kubectl("delete", "pod", killed[-1], "--grace-period=0", "--force")
        kubectl.until(
            lambda role=role, index=index, victim=victim: runs_anew(kubectl, role, index, victim),
            f"{role} {index} runs again",
            job="async",
        )
        for said in SAID.get((role, index), ()):
            kubectl.until(lambda index=index, said=said: re.search(said, log(kubectl, index)), said, job="async")
    kubectl.wait("Finished", "async", patience=1200)
    status = kubectl.status("async")
    story = kubectl.story("async")
    assert kubectl.condition("async", "Complete")["status"] == "True", story
    # Nobody but the killed was made again, and the status names them in order.
    assert status["attempt"] == 1, story
    assert [entry["pod"] for entry in status["attempts"][0]["replacements"]] == killed, story
    assert (status["restarts"], status["progress"]["step"]) == (3, STEPS)
    metrics = {metric["name"]: metric["value"] for metric in status["progress"]["metrics"]}
    assert metrics["accuracy"] >= 0.95, story
    events = kubectl("get", "events", "--field-selector=reason=PodRestarted", "-o", "jsonpath={.items[*].message}")
    assert all(name in events for name in killed), events


def test_servers_whose_node_dies_go_on_elsewhere(kubectl: Kubectl, operator: Kubectl, kubeconfig: Path) -> None:
    if kubeconfig != kubeconfig_path():
        pytest.skip("nodes can be killed on the cluster that tests/cluster starts, not on KUBECONFIG's")
    busy = {one["spec"].get("nodeName") for one in operator.get("pods")["items"]}
    # Where an operator is on each node, another replica takes over.
    node = next((name for name in nodes(kubectl) if name not in busy), nodes(kubectl)[0])
    spec = merge(
        SPEC,
        {
            "workers": {"template": near("NotIn", node)},
            "parameterServers": {"template": near("In", node)},
            "runPolicy": {"terminationTimeoutSeconds": 10},
            "training": {"steps": STEPS // 3},
        },
    )
    kubectl.apply(job("orphans", spec))
    kubectl.wait("Running", "orphans")
    kubectl.until(lambda: newest(kubectl, "orphans") > 0, "a checkpoint", job="orphans")
    victims = [pod(kubectl, "ps", index, "orphans") for index in ("0", "1")]
    assert {one["spec"]["nodeName"] for one in victims} == {node}, kubectl.story("orphans")
    cluster_command("kill-node", node)
    try:
        for index, victim in zip(("0", "1"), victims, strict=True):
            kubectl.until(
                lambda index=index, victim=victim: runs_anew(kubectl, "ps", index, victim, "orphans"),
                f"server {index} runs elsewhere",
                job="orphans",
            )
        kubectl.wait("Finished", "orphans", patience=1200)
    finally:
        cluster_command("start-node", node)
    status = kubectl.status("orphans")
    story = kubectl.story("orphans")
    assert kubectl.condition("orphans", "Complete")["status"] == "True", story
    assert status["attempt"] == 1, story
    replaced = {(entry["pod"], entry["reason"]) for entry in status["attempts"][0]["replacements"]}
    # The workers have waited for them, and a dead node is not the job's fault.
    assert replaced == {(one["metadata"]["name"], "NodeLost") for one in victims}, story
    assert (status["restarts"], status["restartsSinceCheckpoint"]) == (2, 0), story
    kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=180s", timeout=200)


def nodes(kubectl: Kubectl) -> list[str]:
    return [one["metadata"]["name"] for one in kubectl.get("nodes")["items"]]


def near(operator: str, node: str) -> dict[str, Any]:
    """A template of pods that go to the node (In), or to another one (NotIn), where they can."""
    wanted = {"key": "kubernetes.io/hostname", "operator": operator, "values": [node]}
    term = {"weight": 100, "preference": {"matchExpressions": [wanted]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {"spec": {**WITH_SLOW_DATA["spec"], "affinity": affinity}}


def newest(kubectl: Kubectl, name: str = "async") -> int:
    return max(checkpoints(kubectl, name), default=0)


def pod(kubectl: Kubectl, role: str, index: str, name: str = "async") -> dict[str, Any]:
    found = [
        one
        for one in kubectl.pods(name)
        if (one["metadata"]["labels"]["disttrain.io/role"], one["metadata"]["labels"]["disttrain.io/index"])
        == (role, index)
    ]
    return found[0] if found else {}


def log(kubectl: Kubectl, server: str) -> str:
    found = pod(kubectl, "ps", server)
    return kubectl.run("logs", found["metadata"]["name"], "-c", "trainer").stdout if found else ""


def runs_anew(kubectl: Kubectl, role: str, index: str, victim: dict[str, Any], name: str = "async") -> bool:
    found = pod(kubectl, role, index, name)
    if not found or found["metadata"]["uid"] == victim["metadata"]["uid"]:
        return False
    return bool(found["status"].get("phase") == "Running")
