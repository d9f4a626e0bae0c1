"""A real etcd and kube-apiserver, without nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.fleet import Fleet, fate_of
from tests.integration.kubelet import Kubelet
from tests.integration.operator_process import a_team, install_crd, remove_jobs
from tests.soak import SOAK
from tools.cluster.control_plane import ControlPlane

LAST = ("test_gangs.py", "test_gang_schedulers.py", "test_gate.py", "test_kueue.py")
"""They need more than an API server. From cold, that is built beside the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name in LAST)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if item.get_closest_marker("timeout") is None:
                # From cold, the programs are built first.
                item.add_marker(pytest.mark.timeout(1800))
        if item.get_closest_marker("schedulers") and not SOAK:
            item.add_marker(pytest.mark.skip(reason="schedulers of others are built by `make soak` alone"))


# It ends with the package, not with the session: the end-to-end tests that follow need the processors.
@pytest.fixture(scope="package")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server for tests that leave it as they found it. Its programs are built where they are missing."""
    with ControlPlane(audit_log=tmp_path_factory.mktemp("audit") / "audit.log") as control_plane:
        yield control_plane


@pytest.fixture(scope="module")
def control_plane(api_server: ControlPlane) -> Iterator[ControlPlane]:
    """The same with the definition of jobs, for modules whose operators run one after the other: each begins without
    the jobs of others. To start one takes as long as forty tests."""
    install_crd(api_server.api)
    yield api_server
    remove_jobs(api_server.api)


@pytest.fixture(scope="package")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.log"


@pytest.fixture(scope="package")
def sea(audit_log: Path) -> Iterator[ControlPlane]:
    """A control plane for fleets, with somebody who runs their pods as their names say. One operator at a time."""
    with ControlPlane(audit_log=audit_log) as started:
        install_crd(started.api)
        with Kubelet(started, fate_of):
            yield started


@pytest.fixture
def fleet(sea: ControlPlane, request: pytest.FixtureRequest) -> Fleet:
    """In a namespace of its own."""
    return Fleet(a_team(sea, request))
