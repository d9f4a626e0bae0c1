"""What the tests ask of a job."""

import os
import subprocess
import sys
from typing import Any

from tests.e2e.kubectl import Kubectl

# Waits in the pod: to look from outside once a second takes the processors away that the job needs.
_CHECKPOINT = """
for _ in $(seq 60); do
    for file in /checkpoints/*/step-*/.metadata; do
        step=${file%/.metadata}
        step=${step##*step-}
        [ "$step" -ge "$0" ] 2>/dev/null && newest=$step
    done
    [ -n "$newest" ] && echo "$newest" && exit
    sleep 0.5
done
"""

# Every rank of the pod, and neither the agent nor this shell, whose own words are not to match.
_STOP_RANKS = """
stopped=0
for process in /proc/[0-9]*; do
    if grep -qs 'disttrain[_]trainer' "$process/cmdline"; then
        kill -STOP "${process#/proc/}" && stopped=$((stopped + 1))
    fi
done
[ "$stopped" -gt 0 ]
"""


def stop_ranks(kubectl: Kubectl, name: str) -> None:
    """Stop all ranks of a pod by a signal that no program can catch."""
    kubectl("exec", name, "-c", "trainer", "--", "sh", "-c", _STOP_RANKS)


def disttrain(kubectl: Kubectl, *arguments: str) -> str:
    """Standard output of the command in the test's namespace."""
    command = [sys.executable, "-m", "disttrain.main", *arguments, "-n", kubectl.namespace]
    environment = os.environ | {"KUBECONFIG": str(kubectl.kubeconfig)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, f"disttrain {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def checkpoint(kubectl: Kubectl, name: str, at_least: int = 1) -> int:
    """Wait for a complete checkpoint of that step or a later one, as a pod sees it on the shared storage; its step."""

    def newest() -> int:
        pods = [pod for pod in kubectl.pods(name) if pod["status"]["phase"] == "Running"]
        if not pods:
            return 0
        inside = ("-c", "trainer", "--", "sh", "-c", _CHECKPOINT, str(at_least))
        return int(kubectl.run("exec", pods[0]["metadata"]["name"], *inside).stdout.strip() or 0)

    return int(kubectl.until(newest, f"a checkpoint of step {at_least}", job=name))


def saved_step(kubectl: Kubectl, name: str) -> int:
    """Wait for a checkpoint in the status of a job; its step."""
    return int(kubectl.until(lambda: kubectl.status(name).get("checkpoint"), "a checkpoint", job=name)["step"])


def train_until_a_checkpoint(kubectl: Kubectl, name: str, at_least: int = 1) -> int:
    """Wait for a checkpoint of a running job; its step."""
    kubectl.wait("Running", name)
    return checkpoint(kubectl, name, at_least)


def first_step(kubectl: Kubectl, name: str, attempt: int) -> int:
    """The first step that rank 0 of an attempt logged."""
    (pod,) = [
        pod["metadata"]["name"]
        for pod in kubectl.pods(name)
        if pod["metadata"]["labels"]["disttrain.io/attempt"] == str(attempt)
        and pod["metadata"]["labels"]["disttrain.io/index"] == "0"
    ]
    return int(kubectl.wait_for_log(pod, r"\bstep: *(\d+)", job=name)[1])


def is_ready(kubectl: Kubectl, node: str) -> bool:
    """Whether the cluster takes a node for one that lives."""
    conditions = kubectl.get("node", node)["status"]["conditions"]
    return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)


def spare_node(kubectl: Kubectl, operator: Kubectl) -> str:
    """Name of a node: not the operator's, where it has no replica on each."""
    busy = {one["spec"].get("nodeName") for one in operator.get("pods")["items"]}
    names = [str(one["metadata"]["name"]) for one in kubectl.get("nodes")["items"]]
    return next((name for name in names if name not in busy), names[0])


def end_soon(kubectl: Kubectl, name: str) -> None:
    """Delete a job that would train for ever."""
    kubectl("delete", "dtj", name, "--timeout=120s", timeout=150)


def verdict(kubectl: Kubectl, name: str, attempt: int = 1) -> dict[str, Any]:
    """Why an attempt ended, once it has."""
    kubectl.wait_for(f"{{.status.attempts[?(@.number=={attempt})].verdict.class}}", name)
    (found,) = [entry["verdict"] for entry in kubectl.status(name)["attempts"] if entry["number"] == attempt]
    answer: dict[str, Any] = found
    return answer


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
