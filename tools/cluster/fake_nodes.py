"""Nodes that only pretend to run pods (kwok), for tests and benchmarks at a scale no machine here has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.cluster.api import ApiClient, Json, wait_for
from tools.cluster.paths import TEMPLATES

_ANNOTATION = "kwok.x-k8s.io/node"


def kwok_command(kubeconfig: Path) -> Sequence[str | Path]:
    """The program alone knows no stage of a node's or a pod's life: all that it plays stands in the config file."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--config={TEMPLATES / 'kwok-stages.yaml'}",
        f"--manage-nodes-with-annotation-selector={_ANNOTATION}=fake",
        "--node-lease-duration-seconds=40",
    ]


def add_fake_nodes(api: ApiClient, count: int) -> None:
    """Returns when pods can be placed on them: ready, and without the taint that new nodes begin with."""
    for index in range(count):
        api.ensure("/api/v1/nodes", fake_node(f"fake-{index}"))
    if count:
        wait_for(lambda: usable_nodes(api.get("/api/v1/nodes")) >= count, 60, lambda: "the fake nodes do not get ready")


def usable_nodes(nodes: Json) -> int:
    return sum(
        not node["spec"].get("taints")
        and any(one["type"] == "Ready" and one["status"] == "True" for one in node["status"].get("conditions", []))
        for node in nodes["items"]
    )


def fake_node(name: str) -> dict[str, object]:
    room = {"cpu": "1000", "memory": "4Ti", "pods": "1000", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {_ANNOTATION: "fake"},
            "labels": {"kubernetes.io/hostname": name, "type": "kwok"},
        },
        "status": {"allocatable": room, "capacity": room},
    }
