"""A job with parameter servers on a real cluster: a server, the manager and a worker are killed; nobody else stops."""

import re
from typing import Any

from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import ONE_THREAD, STORAGE, job
from tests.e2e.observe import checkpoints

STEPS = 3_000
AGAIN = r"goes on from its snapshot after \d+ updates, in life 2"
# By what was made again.
SAID = {("ps", "1"): (AGAIN,), ("ps", "0"): (AGAIN, "has heard 2 workers and goes on after step")}
SPEC: dict[str, Any] = {
    "workers": {"replicas": 2, "template": ONE_THREAD},
    "parameterServers": {"replicas": 2, "template": ONE_THREAD},
    "storage": STORAGE,
    "parallelism": {
        "dataParallel": {"mode": "ParameterServer", "parameterServer": {"synchronization": "Async"}},
    },
    "runPolicy": {"maxRestarts": 3, "failurePolicy": {"rules": [{"name": "alone", "action": "RestartPod"}]}},
    "training": {
        "model": {"name": "mlp"},
        "data": {"name": "digits"},
        "optimizer": {"name": "SGD", "learningRate": 0.05},
        "steps": STEPS,
        "globalBatchSize": 64,
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


def newest(kubectl: Kubectl) -> int:
    return max(checkpoints(kubectl, "async"), default=0)


def pod(kubectl: Kubectl, role: str, index: str) -> dict[str, Any]:
    found = [
        one
        for one in kubectl.pods("async")
        if (one["metadata"]["labels"]["disttrain.io/role"], one["metadata"]["labels"]["disttrain.io/index"])
        == (role, index)
    ]
    return found[0] if found else {}


def log(kubectl: Kubectl, server: str) -> str:
    found = pod(kubectl, "ps", server)
    return kubectl.run("logs", found["metadata"]["name"], "-c", "trainer").stdout if found else ""


def runs_anew(kubectl: Kubectl, role: str, index: str, victim: dict[str, Any]) -> bool:
    found = pod(kubectl, role, index)
    if not found or found["metadata"]["uid"] == victim["metadata"]["uid"]:
        return False
    return bool(found["status"].get("phase") == "Running")
