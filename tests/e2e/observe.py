"""What the tests ask of a job."""

import re
from typing import Any

from tests.e2e.kubectl import Kubectl


def checkpoints(kubectl: Kubectl, name: str) -> list[int]:
    """Steps of the complete checkpoints, as the first worker sees them on the shared storage."""
    pods = [pod for pod in kubectl.pods(name) if pod["status"]["phase"] == "Running"]
    if not pods:
        return []
    look = "ls -d /checkpoints/*/step-*/.metadata 2>/dev/null || true"
    listed = kubectl.run("exec", pods[0]["metadata"]["name"], "-c", "trainer", "--", "sh", "-c", look).stdout
    return sorted(int(step) for step in re.findall(r"step-(\d+)/\.metadata", listed))


def train_until_a_checkpoint(kubectl: Kubectl, name: str, at_least: int = 1) -> int:
    """Wait for a checkpoint of a running job; its step."""
    kubectl.wait("Running", name)
    found = kubectl.until(
        lambda: [step for step in checkpoints(kubectl, name) if step >= at_least], "a checkpoint", job=name
    )
    return int(found[-1])


def first_step(kubectl: Kubectl, name: str, attempt: int) -> int:
    """The first step that rank 0 of an attempt logged."""
    (pod,) = [
        pod["metadata"]["name"]
        for pod in kubectl.pods(name)
        if pod["metadata"]["labels"]["disttrain.io/attempt"] == str(attempt)
        and pod["metadata"]["labels"]["disttrain.io/index"] == "0"
    ]
    found = kubectl.until(
        lambda: re.search(r"\bstep: *(\d+)", kubectl.run("logs", pod, "-c", "trainer").stdout),
        "a logged step",
        job=name,
    )
    return int(found[1])


def end_soon(kubectl: Kubectl, name: str) -> None:
    """Delete a job that would train for ever."""
    kubectl("delete", "dtj", name, "--timeout=120s", timeout=150)


def verdict(kubectl: Kubectl, name: str, attempt: int = 1) -> dict[str, Any]:
    """Why an attempt ended, once it has."""

    def found() -> Any:
        attempts = kubectl.status(name).get("attempts") or []
        return next((entry.get("verdict") for entry in attempts if entry["number"] == attempt), None)

    answer: dict[str, Any] = kubectl.until(found, f"attempt {attempt} ends", job=name)
    return answer


def newest_checkpoint(kubectl: Kubectl, name: str) -> int:
    """The step of the newest complete one; 0 before the first."""
    return max(checkpoints(kubectl, name), default=0)


def pod(kubectl: Kubectl, name: str, role: str, index: str) -> dict[str, Any]:
    """A job's pod; empty while there is none."""
    found = [
        one
        for one in kubectl.pods(name)
        if (one["metadata"]["labels"]["disttrain.io/role"], one["metadata"]["labels"]["disttrain.io/index"])
        == (role, index)
    ]
    return found[0] if found else {}


def wait_until_anew(kubectl: Kubectl, name: str, role: str, index: str, victim: dict[str, Any]) -> None:
    """Wait until another pod runs in the victim's place."""

    def runs() -> bool:
        found = pod(kubectl, name, role, index)
        if not found or found["metadata"]["uid"] == victim["metadata"]["uid"]:
            return False
        return bool(found["status"].get("phase") == "Running")

    kubectl.until(runs, f"{role} {index} runs again", job=name)
