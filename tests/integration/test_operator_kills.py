"""Fleets of jobs come to their ends while the operator, the API server or etcd dies at random moments."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chance import chance
from tests.integration.operator_process import OperatorProcess, eventually, running_operator
from tests.soak import SOAK
from tools.cluster.control_plane import ControlPlane

pytestmark = pytest.mark.timeout(3600)

ROUNDS = 30 if SOAK else 5
JOBS_PER_ROUND = 10


@pytest.fixture
def operator(sea: ControlPlane, tmp_path: Path) -> Iterator[OperatorProcess]:
    with running_operator(sea, tmp_path) as started:
        yield started


def test_jobs_end_as_they_should_although_the_operator_is_killed_again_and_again(operator, fleet, audit_log):
    random = chance()
    for _ in range(ROUNDS):
        fleet.launch(JOBS_PER_ROUND)
        time.sleep(random.uniform(0, 0.6))
        operator.kill()
        fleet.team.collect_garbage()
        operator.start()
        time.sleep(random.uniform(0, 0.6))
        operator.kill()
        fleet.team.collect_garbage()
        operator.start()
    fleet.wait()
    fleet.check(operator, audit_log)


def restart_api_server(control_plane: ControlPlane) -> None:
    control_plane.kill_api_server()
    control_plane.start_api_server()


def restart_etcd(control_plane: ControlPlane) -> None:
    control_plane.kill_etcd()
    control_plane.start_etcd()
    control_plane.wait_until_ready()


@pytest.mark.parametrize("restart", [restart_api_server, restart_etcd], ids=["api-server", "etcd"])
def test_jobs_end_as_they_should_although_a_part_of_the_control_plane_dies(sea, operator, fleet, audit_log, restart):
    random = chance()
    for _ in range(max(ROUNDS // 10, 1)):
        fleet.launch(JOBS_PER_ROUND)
        time.sleep(random.uniform(0, 0.6))
        restart(sea)
        assert operator.health("healthz") == 200, "an outage is no illness"
    fleet.wait()
    fleet.check(operator, audit_log)
    assert operator.process.poll() is None
    eventually(operator.ready)
