"""A real etcd and kube-apiserver, without nodes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane

pytest.register_assert_rewrite("tests.integration.fleet", "tests.integration.operator_process")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)
        if item.get_closest_marker("schedulers") and not os.environ.get("DISTTRAIN_SOAK"):
            item.add_marker(pytest.mark.skip(reason="schedulers of others are built by `make soak` alone"))
            if item.get_closest_marker("timeout") is None:
                # From cold, the programs are built first.
                item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def api_server() -> Iterator[ControlPlane]:
    """An API server for tests that leave it as they found it. Its programs are built where they are missing."""
    with ControlPlane() as control_plane:
        yield control_plane
