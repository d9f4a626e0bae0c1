"""Gangs placed by real schedulers of others, on fake nodes with eight GPUs each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.operator_process import Raw, Team, eventually, install_crd, running_operator
from tools.cluster.control_plane import ControlPlane
from tools.cluster.gang_schedulers import GangScheduler, coscheduling, volcano

pytestmark = pytest.mark.schedulers

GROUPS = {"Coscheduling": "scheduling.x-k8s.io/v1alpha1", "Volcano": "scheduling.volcano.sh/v1beta1"}
STARTERS = {"Coscheduling": coscheduling, "Volcano": volcano}


@pytest.fixture(scope="module")
def control_plane() -> Iterator[ControlPlane]:
    with ControlPlane(controller_manager=True, kwok=True, nodes=2) as started:
        started.api.ensure("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "high"}, "value": 10})
        install_crd(started.api)
        yield started


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with running_operator(control_plane, tmp_path_factory.mktemp("operator")):
        yield


@dataclass
class GangTeam(Team):
    """A namespace whose jobs go to one scheduler."""

    gang: str
    scheduler: GangScheduler

    def a_gang(self, name: str, pods: int, **policy: Any) -> Raw:
        """Pods of four GPUs each."""
        spec = {"runPolicy": {"schedulingPolicy": {"gangScheduler": self.gang, **policy}}}
        return self.create(name, workers={"replicas": pods, "gpusPerPod": 4}, **spec)

    def placed(self, name: str) -> int:
        """Pods of the job that have a node."""
        pods = [pod for pod in self.pods() if pod["metadata"]["labels"]["disttrain.io/job-name"] == name]
        return sum(bool(pod["spec"].get("nodeName")) for pod in pods)

    def groups(self) -> list[Raw]:
        items: list[Raw] = self.api.get(f"/apis/{GROUPS[self.gang]}/namespaces/{self.namespace}/podgroups")["items"]
        return items


@pytest.fixture(params=STARTERS)
def team(control_plane: ControlPlane, operator: None, request: pytest.FixtureRequest) -> Iterator[GangTeam]:
    with STARTERS[request.param](control_plane) as scheduler:
        yield GangTeam(control_plane.api, request.param.lower(), request.param, scheduler)


def test_a_gang_runs_as_a_whole_or_takes_no_room(team: GangTeam) -> None:
    # It has a higher priority, so that the second one does not take its room by preemption.
    team.a_gang("large", 3, priorityClassName="high")
    team.wait_for("Running", name="large")
    policy = {"timeoutSeconds": 5} if team.gang == "Coscheduling" else {}
    team.a_gang("second", 2, **policy)
    waiting = team.wait_for("Running", status="False", reason="Unschedulable", name="second")
    assert waiting["message"]
    assert team.placed("second") == 0
    assert sorted(group["spec"]["minMember"] for group in team.groups()) == [2, 3]
    team.delete("large")
    eventually(lambda: team.placed("second") == 2, lambda: [team.status("second"), team.scheduler.end_messages()])
    team.wait_for("Running", name="second")
    team.delete("second")
    eventually(lambda: not team.pods() and not team.groups())
