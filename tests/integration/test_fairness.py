"""One tenant's thousands beside another's few, with a real API server that counts a quota."""

import time
from collections.abc import Iterator

import pytest

from disttrain_operator.refused import SECONDS_BETWEEN_TRIES, WOKEN_AT_ONCE
from tests.integration.audit import requests_of_operator
from tests.integration.kubelet import Kubelet
from tests.integration.operator_process import Team, eventually, install_crd, running_operator
from tools.cluster.control_plane import ControlPlane

JOBS = 40


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    log = tmp_path_factory.mktemp("audit") / "audit.log"
    with ControlPlane(controller_manager=True, audit_log=log) as started:
        install_crd(started.api)
        with Kubelet(started), running_operator(started, tmp_path_factory.mktemp("operator")):
            yield started


def test_a_pod_that_goes_from_a_full_namespace_costs_few_requests_and_lets_the_next_job_in(control_plane):
    team = Team(control_plane.api, "full")
    quotas = "/api/v1/namespaces/full/resourcequotas"
    team.ask("POST", quotas, {"metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}})
    eventually(lambda: (team.api.get(f"{quotas}/one").get("status") or {}).get("hard"))
    names = [f"job-{number}" for number in range(JOBS)]
    for name in names:
        team.create(name, workers={"replicas": 1}, runPolicy={"startingDeadlineSeconds": 86400})

    def running() -> list[str]:
        return [name for name in names if team.exists(name) and team.condition("Running", name)["status"] == "True"]

    def refused() -> int:
        return sum(team.condition("Running", name)["reason"] == "QuotaExceeded" for name in names)

    eventually(lambda: refused() == JOBS - 1, refused)
    began, before = time.monotonic(), tries(control_plane)
    let_in, freed = set(running()), 5
    for _ in range(freed):
        (name,) = eventually(running)
        team.delete(name)
        let_in.add(eventually(lambda gone=name: [other for other in running() if other != gone])[0])
    asked = tries(control_plane) - before
    assert len(let_in) == freed + 1
    # Their own tries, however long this took, and the few that each pod wakes; each of these tries a few times, until
    # the quota is counted anew.
    by_themselves = (time.monotonic() - began) / SECONDS_BETWEEN_TRIES
    assert asked <= by_themselves + freed * WOKEN_AT_ONCE * 2 + 10


def tries(control_plane: ControlPlane) -> int:
    """Pods that the operator has asked for in the full namespace."""
    assert control_plane.audit_log is not None
    asked = requests_of_operator(control_plane.audit_log, "full")
    return sum(count for (verb, resource, _), count in asked.items() if (verb, resource) == ("create", "pods"))
