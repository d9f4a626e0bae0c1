"""The life of a job: the operator as a process against a real API server. The test plays user and kubelet."""

import json
from collections.abc import Iterator

import pytest

from disttrain_api.history import HISTORY_NAME
from tests.builders import a_claim_template
from tests.integration.audit import requests_of_operator
from tests.integration.operator_process import Raw, Team, a_team, eventually, running_operator
from tools.cluster.control_plane import ControlPlane


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with running_operator(control_plane, tmp_path_factory.mktemp("operator")):
        yield


@pytest.fixture
def team(control_plane: ControlPlane, operator: None, request: pytest.FixtureRequest) -> Team:
    return a_team(control_plane, request)


def test_a_job_of_n_pods_costs_n_plus_4_requests_until_it_runs(team: Team, control_plane: ControlPlane) -> None:
    team.create(workers={"replicas": 20})
    team.run(team.wait_for_pods(20))
    team.wait_for("Running")
    assert control_plane.audit_log is not None
    eventually(lambda: len(team.children("events")) == 2)
    counted = requests_of_operator(control_plane.audit_log, team.namespace)
    events = counted.pop(("create", "events", 201))
    assert counted == {
        ("create", "pods", 201): 20,
        ("create", "services", 201): 1,
        ("create", "secrets", 201): 1,
        ("update", "disttrainingjobs/status", 200): 2,
    }
    assert events == 2
    assert {event["reason"] for event in team.children("events")} == {"CreatingPods", "AllPodsRunning"}


def ended_watches_of_jobs(control_plane: ControlPlane) -> int:
    """As the API server counts them."""
    page = control_plane.api.ask("GET", "/metrics").body.decode()
    lines = (line for line in page.splitlines() if line.startswith("apiserver_request_total{"))
    counted = (line for line in lines if 'resource="disttrainingjobs"' in line and 'verb="WATCH"' in line)
    return int(sum(float(line.rpartition(" ")[2]) for line in counted))


def test_watches_of_jobs_last_for_many_changes(team: Team, control_plane: ControlPlane) -> None:
    """A watch that ends at its first event is begun again a hundred times a second, which its events do not show."""
    before = ended_watches_of_jobs(control_plane)
    for number in range(10):
        name = f"job-{number}"
        team.create(name, workers={"replicas": 1})
        eventually(lambda name=name: team.status(name).get("attempt") == 1)
        team.patch(name, suspend=True)
        team.wait_for("Suspended", name=name)
    # Now and then the informer's has had its time.
    assert ended_watches_of_jobs(control_plane) - before < 10


def test_a_job_runs_and_completes(team: Team) -> None:
    team.create()
    pods = team.wait_for_pods(2)
    team.run(pods[:1])
    team.wait_for("Running", status="False", reason="WaitingForPods")
    team.run(pods)
    team.wait_for("Running", reason="AllPodsRunning")
    assert team.status()["ready"] == "2/2"
    team.finish(pods)
    team.wait_for("Complete")
    assert team.condition("Finished")["status"] == "True"
    assert team.status()["phase"] == "Succeeded"
    assert len(team.pods()) == 2, "pods that have ended keep their logs"


def test_a_finished_jobs_end_outlives_it(team: Team) -> None:
    team.create(workers={"replicas": 1}, ttlSecondsAfterFinished=0)
    pods = team.wait_for_pods(1)
    team.run(pods)
    team.wait_for("Running", reason="AllPodsRunning")
    team.finish(pods)

    def kept() -> list[Raw]:
        config_maps = [found for found in team.children("configmaps") if found["metadata"]["name"] == HISTORY_NAME]
        return [json.loads(text) for config_map in config_maps for text in config_map["data"].values()]

    eventually(lambda: not team.exists() and kept())
    assert [(entry["name"], entry["phase"]) for entry in kept()] == [("job", "Succeeded")]


def test_a_failed_pod_restarts_the_gang_once(team: Team) -> None:
    team.create()
    first = team.wait_for_pods(2)
    team.run(first)
    team.wait_for("Running")
    team.finish(first[1:], code=1)
    second = team.wait_for_pods(2, attempt=2)
    team.run(second)
    team.wait_for("Running")
    status = team.status()
    assert (status["attempt"], status["restarts"]) == (2, 1)
    assert status["attempts"][0]["verdict"]["exitCode"] == 1
    assert team.pods(1) == []


def test_what_pods_wait_for_is_made_again_where_somebody_deletes_it(team: Team) -> None:
    team.create(storage=a_claim_template())
    pods = team.wait_for_pods(2)
    kinds = ("services", "secrets", "persistentvolumeclaims")
    for kind in kinds:
        for child in team.children(kind):
            # No controller of this control plane takes the finalizer off a claim that nobody uses.
            path = f"/api/v1/namespaces/{team.namespace}/{kind}/{child['metadata']['name']}"
            team.ask("PATCH", path, {"metadata": {"finalizers": None}})
            team.ask("DELETE", path)
    long_ago = "2026-01-01T00:00:00Z"
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": long_ago}
    for pod in pods:
        path = f"/api/v1/namespaces/{team.namespace}/pods/{pod['metadata']['name']}"
        binding = {"metadata": {"name": pod["metadata"]["name"]}, "target": {"kind": "Node", "name": "node1"}}
        team.ask("POST", f"{path}/binding", binding)
        team.ask("PATCH", f"{path}/status", {"status": {"conditions": [placed]}})
    eventually(lambda: all(team.children(kind) for kind in kinds), lambda: "they are made again")
    team.run(pods)
    team.wait_for("Running")
    assert team.status()["attempt"] == 1
