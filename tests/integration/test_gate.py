"""`gangScheduler: Gate` with a real API server and the cluster's own scheduler, on nodes that only pretend (kwok)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disttrain_operator.preflight import GATE_RIGHTS, RIGHTS
from tests.integration.audit import requests_of_operator
from tests.integration.operator_process import (
    OperatorProcess,
    Raw,
    Team,
    a_team,
    eventually,
    install_crd,
    kubeconfig_with_rights,
    running_operator,
)
from tools.cluster.control_plane import ControlPlane

NODES, GPUS = 4, 8
ZONE = "topology.kubernetes.io/zone"


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    log = tmp_path_factory.mktemp("audit") / "audit.log"
    with ControlPlane(controller_manager=True, scheduler=True, kwok=True, nodes=NODES, audit_log=log) as started:
        install_crd(started.api)
        for index in range(NODES):
            label_node(started, f"fake-{index}", "xyxy"[index])
        yield started


@pytest.fixture(scope="module")
def flags(control_plane: ControlPlane) -> tuple[str, ...]:
    """Flags of an operator with a gate that has the chart's rights and no others."""
    kubeconfig = kubeconfig_with_rights(control_plane, "gatekeeper", (*RIGHTS, *GATE_RIGHTS))
    return "--gang-gate", f"--kubeconfig={kubeconfig}"


@pytest.fixture
def operator(control_plane: ControlPlane, flags: tuple[str, ...], tmp_path: Path) -> Iterator[OperatorProcess]:
    with running_operator(control_plane, tmp_path, *flags) as started:
        yield started
        assert "may not" not in started.log()


@pytest.fixture
def team(control_plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[Team]:
    made = a_team(control_plane, request)
    yield made
    for job in made.api.get(f"/apis/disttrain.io/v1alpha1/namespaces/{made.namespace}/disttrainingjobs")["items"]:
        made.delete(job["metadata"]["name"])
    # What stays would take the room of the next test.
    for pod in made.pods():
        remove(made, pod)
    eventually(lambda: not made.pods())


def label_node(control_plane: ControlPlane, name: str, zone: str) -> None:
    path = f"/api/v1/nodes/{name}"
    content = {"metadata": {"labels": {ZONE: zone}}}
    assert control_plane.api.ask("PATCH", path, content).status == 200


def remove(team: Team, pod: Raw) -> None:
    path = f"/api/v1/namespaces/{team.namespace}/pods/{pod['metadata']['name']}"
    team.api.ask("DELETE", path, {"gracePeriodSeconds": 0})


def a_gang(team: Team, pods: int, name: str = "job", *, gpus: int = GPUS, **policy: Any) -> None:
    team.create(
        name,
        workers={"replicas": pods, "gpusPerPod": gpus, "processesPerPod": 1},
        runPolicy={"schedulingPolicy": {"gangScheduler": "Gate", **policy}, "cleanPodPolicy": "All"},
    )


def occupy(team: Team, node: str, gpus: int = GPUS) -> Raw:
    """A pod of somebody else."""
    container = {"name": "main", "image": "an/image:1", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    pod = {"metadata": {"name": f"other-{node}"}, "spec": {"nodeName": node, "containers": [container]}}
    return team.ask("POST", f"/api/v1/namespaces/{team.namespace}/pods", pod)


def of(team: Team, name: str) -> list[Raw]:
    return [pod for pod in team.pods() if pod["metadata"].get("labels", {}).get("disttrain.io/job-name") == name]


def node_of(pod: Raw) -> str | None:
    node: str | None = pod["spec"].get("nodeName")
    return node


def test_a_gang_that_fits_runs_and_costs_2n_plus_4_requests(control_plane, operator, team):
    pods = 16
    a_gang(team, pods, gpus=2)
    team.wait_for("Running")
    assert control_plane.audit_log is not None
    counted = requests_of_operator(control_plane.audit_log, team.namespace)
    counted.pop(("create", "events", 201), None)
    assert counted == {
        ("create", "pods", 201): pods,
        ("patch", "pods", 200): pods,
        ("create", "services", 201): 1,
        ("create", "secrets", 201): 1,
        ("update", "disttrainingjobs/status", 200): 2,
    }


def test_ranks_follow_the_topology(operator: OperatorProcess, team: Team) -> None:
    """The whole job is one group: two nodes of one zone."""
    other = occupy(team, "fake-0")
    a_gang(team, 4, gpus=4, topology={"required": ZONE})
    team.wait_for("Running")
    assert [node_of(pod) for pod in of(team, "job")] == ["fake-1", "fake-1", "fake-3", "fake-3"]
    remove(team, other)
    a_gang(team, 5, "large", gpus=4, topology={"required": ZONE})
    waiting = team.wait_for("Running", status="False", reason="WaitingForRoom", name="large")
    assert "needs 5 pods x 4 nvidia.com/gpu" in waiting["message"]


def test_pods_whose_room_was_taken_wait_behind_the_gate_again(control_plane, operator, team):
    """A stranger binds itself to a reserved node before the scheduler binds our pod there."""
    scheduler = next(daemon for daemon in control_plane.daemons() if daemon.name == "kube-scheduler")
    scheduler.stop()
    try:
        a_gang(team, NODES)
        eventually(lambda: len(of(team, "job")) == NODES and not any(is_held(pod) for pod in of(team, "job")))
        stranger = occupy(team, "fake-3")
    finally:
        scheduler.start()
    team.wait_for("Running", status="False", reason="WaitingForRoom")
    remove(team, stranger)
    team.wait_for("Running", reason="AllPodsRunning")
    assert sorted(str(node_of(pod)) for pod in of(team, "job")) == [f"fake-{index}" for index in range(NODES)]
    assert team.status()["restartsSinceCheckpoint"] == 0


def is_held(pod: Raw) -> bool:
    return bool(pod["spec"].get("schedulingGates"))


@pytest.mark.parametrize("kind", ["required", "preferred"])
def test_without_a_gate_the_scheduler_sees_what_belongs_together(operator, team, kind):
    team.create(
        workers={"replicas": 4, "gpusPerPod": 4, "processesPerPod": 1},
        runPolicy={"schedulingPolicy": {"topology": {kind: ZONE}}},
    )
    team.wait_for("Running")
    zones = {"fake-0": "x", "fake-1": "y", "fake-2": "x", "fake-3": "y"}
    assert len({zones[str(node_of(pod))] for pod in of(team, "job")}) == 1
