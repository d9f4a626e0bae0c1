"""Fleets of jobs come to their ends while the way to the API server is bad."""

import time
from collections.abc import Callable, Iterator

import pytest

from tests.chance import chance
from tests.integration.operator_process import running_operator
from tests.integration.proxy import TcpProxy, kubeconfig_through
from tests.soak import SOAK
from tools.cluster.control_plane import ControlPlane

pytestmark = pytest.mark.timeout(3600)

ROUNDS = 8 if SOAK else 1
JOBS_PER_ROUND = 3
# An operator that waits for dead connections as long as in a real cluster would make tests of minutes.
IMPATIENT = ("--request-timeout-seconds=3", "--watch-silence-seconds=3")


@pytest.fixture
def proxy(sea: ControlPlane) -> Iterator[TcpProxy]:
    with TcpProxy(sea.place.address, sea.place.port) as started:
        yield started


NETWORKS: dict[str, Callable[[TcpProxy], None]] = {
    "are-reset": lambda proxy: proxy.reset(),
    "are-half-open": lambda proxy: proxy.half_open(),
    "are-read-no-more": lambda proxy: proxy.stop_reading(),
    "are-cut-in-mid-line": lambda proxy: proxy.cut_in_mid_line(after=700),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_jobs_end_as_they_should_although_all_connections(sea, proxy, fleet, audit_log, tmp_path, kind):
    random = chance()
    server = f"https://127.0.0.1:{proxy.port}"
    kubeconfig = kubeconfig_through(sea.kubeconfig, server, tmp_path)
    with running_operator(sea, tmp_path, f"--kubeconfig={kubeconfig}", *IMPATIENT) as operator:
        proxy.latency = 0.01
        for _ in range(ROUNDS):
            fleet.launch(JOBS_PER_ROUND)
            time.sleep(random.uniform(0, 0.5))
            NETWORKS[kind](proxy)
        fleet.wait()
        fleet.check(operator, audit_log)
