"""Fleets of jobs come to their ends while the API server gives bad answers and its watches break."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.fleet import Fleet, chance
from tests.integration.http_faults import Fault, HttpFaults, requests, watches, writes
from tests.integration.operator_process import OperatorProcess, eventually, running_operator
from tests.integration.proxy import kubeconfig_through
from tests.soak import SOAK
from tools.cluster.control_plane import ControlPlane

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

ROUNDS = 8 if SOAK else 1
JOBS_PER_ROUND = 3
# An operator that waits for dead connections as long as in a real cluster would make tests of minutes.
IMPATIENT = ("--request-timeout-seconds=3", "--watch-silence-seconds=3")


@pytest.fixture(scope="module")
def faults(sea: ControlPlane) -> Iterator[HttpFaults]:
    with HttpFaults(sea) as started:
        yield started


@pytest.fixture(scope="module")
def operator(
    sea: ControlPlane, faults: HttpFaults, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    folder = tmp_path_factory.mktemp("operator")
    kubeconfig = kubeconfig_through(sea.kubeconfig, faults.url, folder, credentials=False)
    with running_operator(sea, folder, f"--kubeconfig={kubeconfig}", *IMPATIENT) as started:
        yield started


@pytest.fixture
def served(faults: HttpFaults, operator: OperatorProcess) -> OperatorProcess:
    """An operator that reaches the API server through `faults`, and hears all that it watches."""
    eventually(lambda: len(faults.streams()) >= 3, lambda: [faults.streams(), operator.log()[-2000:]])
    return operator


ANSWERS = {
    "a-storm-of-429": Fault(requests, times=30, code=429, headers={"Retry-After": "1"}),
    "writes-meet-500": Fault(writes, times=30, code=500),
    "answers-to-writes-are-lost": Fault(writes, times=30, code=504, pass_on=True),
    "watches-are-refused-with-410": Fault(watches, times=6, code=410, reason="Expired"),
    "watches-are-refused-with-500": Fault(watches, times=12, code=500),
    "watches-are-refused-with-429": Fault(watches, times=4, code=429, headers={"Retry-After": "1"}),
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
