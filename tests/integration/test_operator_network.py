"""Fleets of jobs come to their ends while the way to the API server, or what it answers, is bad."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.integration.fleet import SOAK, Fleet, chance, fate_of
from tests.integration.http_faults import Fault, HttpFaults, requests, watches, writes
from tests.integration.kubelet import Kubelet
from tests.integration.operator_process import OperatorProcess, Team, eventually, install_crd, running_operator
from tests.integration.proxy import TcpProxy, kubeconfig_through

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600 if SOAK else 300)]

ROUNDS = 20 if SOAK else 2
JOBS_PER_ROUND = 3
# An operator that waits for dead connections as long as in a real cluster would make tests of minutes.
IMPATIENT = ("--request-timeout-seconds=3", "--watch-silence-seconds=3")


@pytest.fixture(scope="module")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.log"


@pytest.fixture(scope="module")
def control_plane(audit_log: Path) -> Iterator[ControlPlane]:
    with ControlPlane(audit_log=audit_log) as started:
        install_crd(started.api)
        with Kubelet(started, fate_of):
            yield started


@pytest.fixture
def fleet(control_plane: ControlPlane, request: pytest.FixtureRequest) -> Fleet:
    name = request.node.name.removeprefix("test_").replace("_", "-").replace("[", "-").replace("]", "")
    return Fleet(Team(control_plane.api, name[-63:].strip("-").lower()))


@pytest.fixture
def faults(control_plane: ControlPlane) -> Iterator[HttpFaults]:
    with HttpFaults(control_plane) as started:
        yield started


@pytest.fixture
def served(control_plane: ControlPlane, faults: HttpFaults, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator that reaches the API server through `faults`."""
    kubeconfig = kubeconfig_through(control_plane.kubeconfig, faults.url, tmp_path, credentials=False)
    with running_operator(control_plane, tmp_path, f"--kubeconfig={kubeconfig}", *IMPATIENT) as started:
        eventually(lambda: len(faults.streams()) >= 4, faults.streams)
        yield started


ANSWERS = {
    "a-storm-of-429": Fault(requests, times=60, code=429, headers={"Retry-After": "1"}),
    "writes-meet-500": Fault(writes, times=60, code=500),
    "answers-to-writes-are-lost": Fault(writes, times=60, code=504, pass_on=True),
    "watches-are-refused-with-410": Fault(watches, times=12, code=410, reason="Expired"),
    "watches-are-refused-with-500": Fault(watches, times=40, code=500),
    "watches-are-refused-with-429": Fault(watches, times=12, code=429, headers={"Retry-After": "1"}),
    "an-answer-is-no-json": Fault(writes, times=20, code=200, body=b'{"kind": "Po'),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_jobs_end_as_they_should_although(
    faults: HttpFaults, served: OperatorProcess, fleet: Fleet, audit_log: Path, kind: str
) -> None:
    for _ in range(ROUNDS):
        fault = faults.add(Fault(**vars(ANSWERS[kind])))
        if fault.concerns is watches:
            faults.end_watches()
        fleet.launch(JOBS_PER_ROUND)
        eventually(lambda fault=fault: faults.met(fault), lambda: served.log()[-2000:])
    fleet.wait()
    fleet.check(served, audit_log)


EXPIRED = b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old"}}\n'
BROKEN = b'{"type":"ERROR","object":{"kind":"Status","code":500,"reason":"InternalError","message":"broken"}}\n'
STREAMS: dict[str, Callable[[HttpFaults], None]] = {
    "end": lambda faults: faults.end_watches(),
    "end-with-410": lambda faults: faults.end_watches(EXPIRED),
    "end-with-500": lambda faults: faults.end_watches(BROKEN),
    "end-in-mid-line": lambda faults: faults.end_watches(b'{"type":"ADDED","object":{"metadata":{"na'),
    "say-what-is-no-json": lambda faults: faults.say(b'{"type": oh\n'),
    "fall-silent": lambda faults: faults.silence_watches(),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_jobs_end_as_they_should_although_all_watches(
    faults: HttpFaults, served: OperatorProcess, fleet: Fleet, audit_log: Path, kind: str
) -> None:
    random = chance()
    for _ in range(ROUNDS):
        fleet.launch(JOBS_PER_ROUND)
        time.sleep(random.uniform(0, 0.5))
        STREAMS[kind](faults)
    fleet.wait()
    fleet.check(served, audit_log)


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[TcpProxy]:
    with TcpProxy(control_plane.place.address, control_plane.place.port) as started:
        yield started


NETWORKS: dict[str, Callable[[TcpProxy], None]] = {
    "are-reset": lambda proxy: proxy.reset(),
    "are-half-open": lambda proxy: proxy.half_open(),
    "are-read-no-more": lambda proxy: proxy.stop_reading(),
    "are-cut-in-mid-line": lambda proxy: proxy.cut_in_mid_line(after=700),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_jobs_end_as_they_should_although_all_connections(
    control_plane: ControlPlane, proxy: TcpProxy, fleet: Fleet, audit_log: Path, tmp_path: Path, kind: str
) -> None:
    random = chance()
    server = f"https://127.0.0.1:{proxy.port}"
    kubeconfig = kubeconfig_through(control_plane.kubeconfig, server, tmp_path)
    with running_operator(control_plane, tmp_path, f"--kubeconfig={kubeconfig}", *IMPATIENT) as operator:
        proxy.latency = 0.01
        for _ in range(ROUNDS):
            fleet.launch(JOBS_PER_ROUND)
            time.sleep(random.uniform(0, 0.5))
            NETWORKS[kind](proxy)
        fleet.wait()
        fleet.check(operator, audit_log)
