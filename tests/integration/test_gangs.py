"""What a gang asks of the cluster beside its pods, by an operator with the rights that the chart gives by default.

Schedulers of others are met in test_kueue.py and test_gang_schedulers.py.
"""

from collections.abc import Iterator

import pytest

from disttrain_operator.preflight import RIGHTS
from tests.integration.operator_process import (
    Team,
    a_team,
    eventually,
    install_crd,
    kubeconfig_with_rights,
    running_operator,
)
from tools.cluster.control_plane import ControlPlane

CONTROLLERS = "disruption-controller,garbage-collector-controller,serviceaccount-controller"


@pytest.fixture(scope="module")
def control_plane() -> Iterator[ControlPlane]:
    flags = [f"--controllers={CONTROLLERS}"]
    with ControlPlane(controller_manager=True, controller_manager_flags=flags) as started:
        install_crd(started.api)
        yield started


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """It has the rights that the chart gives by default, and no others."""
    kubeconfig = kubeconfig_with_rights(control_plane, "an-operator", RIGHTS)
    with running_operator(control_plane, tmp_path_factory.mktemp("operator"), f"--kubeconfig={kubeconfig}"):
        yield


@pytest.fixture
def team(control_plane: ControlPlane, operator: None, request: pytest.FixtureRequest) -> Team:
    return a_team(control_plane, request)


def test_a_disruption_budget_holds_evictions_back_and_goes_with_the_job(team: Team) -> None:
    team.create(workers={"replicas": 3}, runPolicy={"disruptionBudget": {"minAvailable": 3}})
    pods = team.wait_for_pods(3)
    team.run(pods)
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    for pod in pods:
        team.ask("PATCH", f"/api/v1/namespaces/{team.namespace}/pods/{pod['metadata']['name']}/status", ready)
    team.wait_for("Running")
    budgets = f"/apis/policy/v1/namespaces/{team.namespace}/poddisruptionbudgets"
    eventually(lambda: team.api.get(budgets)["items"][0].get("status", {}).get("currentHealthy") == 3)
    name = pods[0]["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"/api/v1/namespaces/{team.namespace}/pods/{name}/eviction"
    assert team.api.ask("POST", path, eviction).status == 429
    assert len(team.pods(1)) == 3
    team.delete()
    eventually(lambda: team.api.get(budgets)["items"] == [])


def test_why_a_pod_on_a_node_does_not_start_is_read_from_its_events_alone(team: Team) -> None:
    """It takes the half minute that pods are given to start before anybody asks."""
    team.create()
    pods = team.wait_for_pods(2)
    for pod in pods:
        name = pod["metadata"]["name"]
        node = {"metadata": {"name": name}, "target": {"kind": "Node", "name": "node7"}}
        team.ask("POST", f"/api/v1/namespaces/{team.namespace}/pods/{name}/binding", node)
    for number, (uid, message) in enumerate((("another pod", "not this"), (pods[0]["metadata"]["uid"], "no such map"))):
        event = {
            "metadata": {"name": f"event-{number}"},
            "involvedObject": {"kind": "Pod", "namespace": team.namespace, "name": "x", "uid": uid},
            "type": "Warning",
            "reason": "FailedMount",
            "message": message,
            "lastTimestamp": "2026-01-01T12:00:00Z",
        }
        team.ask("POST", f"/api/v1/namespaces/{team.namespace}/events", event)
    condition = team.wait_for("Running", status="False", reason="FailedMount")
    assert f"pod {pods[0]['metadata']['name']} on node node7: no such map; check" in condition["message"]
