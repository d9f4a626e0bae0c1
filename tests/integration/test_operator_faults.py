"""What must not matter: the operator dies, the API server goes away, both at bad moments."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.kubelet import Witness
from tests.integration.operator_process import (
    OperatorProcess,
    Team,
    a_team,
    eventually,
    install_crd,
    killed_until,
    kubeconfig_with_rights,
    running_operator,
)
from tools.cluster.control_plane import ControlPlane


@pytest.fixture
def team(control_plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[Team]:
    made = a_team(control_plane, request)
    yield made
    if made.exists():
        made.delete()


@pytest.fixture
def operator(control_plane: ControlPlane, tmp_path: Path) -> Iterator[OperatorProcess]:
    with running_operator(control_plane, tmp_path) as started:
        yield started


@pytest.fixture
def witness(control_plane: ControlPlane) -> Iterator[Witness]:
    with Witness(control_plane) as watching:
        yield watching


def test_an_operator_that_is_killed_during_a_restart_counts_it_once(operator, team, witness):
    workers = 12
    team.create(workers={"replicas": workers})
    pods = team.wait_for_pods(workers)
    team.run(pods)
    team.wait_for("Running")
    operator.kill()
    team.finish(pods[3:4], code=1)
    killed_until(operator, team, lambda: len(team.pods(2)) == workers)
    operator.start()
    team.run(team.wait_for_pods(workers, attempt=2))
    team.wait_for("Running")
    status = team.status()
    assert (status["attempt"], status["restarts"], len(status["attempts"])) == (2, 1, 2)
    assert team.pods(1) == []
    assert witness.made_until(team.pods()) == 2 * workers


def test_what_happens_while_the_operator_is_down_is_seen_when_it_is_back(operator: OperatorProcess, team: Team) -> None:
    team.create("fails")
    team.create("goes")
    failing = eventually(lambda: [pod for pod in team.pods() if pod["metadata"]["name"].startswith("fails-")])
    eventually(lambda: len(team.pods()) == 4)
    failing = [pod for pod in team.pods() if pod["metadata"]["name"].startswith("fails-")]
    team.run(team.pods())
    team.wait_for("Running", name="fails")
    team.wait_for("Running", name="goes")
    operator.kill()
    team.finish(failing, code=1)
    team.delete("goes")
    team.create("comes")
    operator.start()
    eventually(lambda: team.status("fails").get("attempt") == 2, lambda: team.status("fails"))
    eventually(lambda: team.status("comes").get("attempt") == 1)
    for name in ("fails", "comes"):
        team.delete(name)


def test_the_operator_survives_the_api_server(control_plane, operator, team):
    team.create("before")
    pods = team.wait_for_pods(2)
    team.run(pods)
    team.wait_for("Running", name="before")
    control_plane.kill_api_server()
    assert operator.health("healthz") == 200, "an outage is no illness"
    control_plane.start_api_server()
    team.finish(pods)
    team.create("after")
    team.wait_for("Complete", name="before")
    eventually(lambda: len(team.pods()) == 4)
    assert operator.process.poll() is None
    for name in ("before", "after"):
        team.delete(name)


def test_the_operator_waits_for_its_crd_and_says_so(tmp_path: Path) -> None:
    with ControlPlane() as bare:
        operator = OperatorProcess(bare, tmp_path)
        try:
            operator.start(wait=False)
            eventually(lambda: "is not installed" in operator.log())
            assert operator.health("readyz") == 503
            assert operator.health("healthz") == 200
            install_crd(bare.api)
            eventually(operator.ready)
        finally:
            operator.kill()


def test_missing_rights_are_named_in_one_line(control_plane: ControlPlane, tmp_path: Path) -> None:
    reads = ("get", "list", "watch")
    rights = [("disttrain.io", "*", ("*",)), ("", "pods", reads), ("", "services", reads)]
    kubeconfig = kubeconfig_with_rights(control_plane, "reader", rights)
    with running_operator(control_plane, tmp_path, f"--kubeconfig={kubeconfig}", "--network-policies") as operator:
        lines = [line for line in operator.log().splitlines() if "may not" in line]
    line, about_agents = lines
    assert "may not: get pods/proxy, create pods/proxy; jobs show no progress" in about_agents
    assert "create pods" in line
    assert "create secrets" in line
    assert "create networkpolicies" in line
    assert "list pods" not in line


def test_sigterm_ends_the_operator_at_once_and_cleanly(operator: OperatorProcess) -> None:
    assert operator.stop() == 0
    assert "Traceback" not in operator.log()
