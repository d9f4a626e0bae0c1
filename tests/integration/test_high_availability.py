"""Two replicas, one of which acts: the leader dies, ends, or is cut off, and nothing is lost or done twice."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from disttrain_operator.preflight import HISTORY_RIGHTS, LEASE_RIGHTS, PROXY_RIGHTS, RIGHTS
from tests.chance import chance
from tests.integration.fleet import Fleet
from tests.integration.operator_process import LEASE, OperatorProcess, eventually
from tests.integration.proxy import TcpProxy, kubeconfig_through
from tests.soak import SOAK
from tools.cluster.control_plane import ControlPlane

pytestmark = pytest.mark.timeout(3600)

ROUNDS = 10 if SOAK else 3
JOBS_PER_ROUND = 6


class Pair:
    """Two replicas; each reaches the API server through a proxy of its own."""

    def __init__(self, control_plane: ControlPlane, folder: Path) -> None:
        self.api = control_plane.api
        self.operators: dict[str, OperatorProcess] = {}
        self.proxies: dict[str, TcpProxy] = {}
        for name in ("one", "two"):
            proxy = TcpProxy(control_plane.place.address, control_plane.place.port)
            proxy.__enter__()
            (folder / name).mkdir()
            kubeconfig = kubeconfig_through(control_plane.kubeconfig, f"https://127.0.0.1:{proxy.port}", folder / name)
            flags = ("--leader-elect", f"--replica-name={name}", f"--kubeconfig={kubeconfig}")
            self.proxies[name] = proxy
            self.operators[name] = OperatorProcess(
                control_plane, folder / name, *flags, "--request-timeout-seconds=3", "--watch-silence-seconds=3"
            )
            self.operators[name].start()

    def end(self) -> None:
        for operator in self.operators.values():
            operator.kill()
        for proxy in self.proxies.values():
            proxy.__exit__(None, None, None)

    def leader(self) -> str:
        """The replica that acts; "" where none does."""
        for name, operator in self.operators.items():
            if operator.process is not None and operator.process.poll() is None and self.acts(name):
                return name
        return ""

    def acts(self, name: str) -> bool:
        return "disttrain_leader 1.0" in self.operators[name].page("metrics")

    def wait_for_leader(self, *, other_than: str = "") -> str:
        found: str = eventually(lambda: (name := self.leader()) != other_than and name, self.report)
        return found

    def finish(self, fleet: Fleet, audit_log: Path) -> None:
        """Returns when all jobs have ended as they should, which both replicas are asked."""
        fleet.wait()
        for operator in self.operators.values():
            fleet.check(operator, audit_log)

    def report(self) -> object:
        return [operator.log()[-2000:] for operator in self.operators.values()]


@pytest.fixture
def pair(sea: ControlPlane, tmp_path: Path) -> Iterator[Pair]:
    started = Pair(sea, tmp_path)
    yield started
    started.end()
    sea.api.ask("DELETE", LEASE)


def test_a_killed_leader_is_succeeded_in_the_middle_of_its_work(fleet: Fleet, pair: Pair, audit_log: Path) -> None:
    random = chance()
    for _ in range(ROUNDS):
        leader = pair.wait_for_leader()
        fleet.launch(JOBS_PER_ROUND)
        time.sleep(random.uniform(0, 1.0))
        pair.operators[leader].kill()
        fleet.team.collect_garbage()
        pair.wait_for_leader(other_than=leader)
        pair.operators[leader].start()
    pair.finish(fleet, audit_log)


def test_a_leader_that_gets_sigterm_hands_over(fleet: Fleet, pair: Pair, audit_log: Path) -> None:
    random = chance()
    for _ in range(ROUNDS):
        leader = pair.wait_for_leader()
        fleet.launch(JOBS_PER_ROUND)
        time.sleep(random.uniform(0, 1.0))
        assert pair.operators[leader].stop() == 0
        fleet.team.collect_garbage()
        holder = pair.api.get(LEASE)["spec"].get("holderIdentity") or ""
        assert not holder.startswith(f"{leader}_"), "the lease was given back before the process ended"
        pair.wait_for_leader(other_than=leader)
        pair.operators[leader].start()
    pair.finish(fleet, audit_log)


def test_a_leader_that_stands_still_leaves_nothing_undone(fleet: Fleet, pair: Pair, audit_log: Path) -> None:
    random = chance()
    for _ in range(ROUNDS):
        leader = pair.operators[pair.wait_for_leader()].process
        assert leader is not None
        fleet.launch(JOBS_PER_ROUND)
        time.sleep(random.uniform(0, 0.5))
        leader.send_signal(signal.SIGSTOP)
        # About as long as it may act without a renewal (1.5 s) and until the other one takes over (2 s).
        time.sleep(random.uniform(1.3, 2.5))
        leader.send_signal(signal.SIGCONT)
    pair.finish(fleet, audit_log)


def test_a_leader_that_is_cut_off_ceases_to_act(fleet: Fleet, pair: Pair, audit_log: Path) -> None:
    leader = pair.wait_for_leader()
    fleet.launch(JOBS_PER_ROUND)
    proxy = pair.proxies[leader]
    proxy.accepting = False
    proxy.half_open()
    fleet.launch(JOBS_PER_ROUND)
    heir = pair.wait_for_leader(other_than=leader)
    eventually(lambda: not pair.acts(leader), pair.report)
    fleet.wait()
    proxy.accepting = True
    proxy.reset()
    eventually(pair.operators[leader].ready)
    assert pair.leader() == heir
    fleet.launch(JOBS_PER_ROUND)
    pair.finish(fleet, audit_log)


def state_seconds(page: str) -> float:
    found = (line.split() for line in page.splitlines() if line.startswith("disttrain_job_state_seconds_total"))
    return sum(float(value) for _, value in found)


def test_a_standby_writes_nothing(fleet: Fleet, pair: Pair, audit_log: Path) -> None:
    leader = pair.wait_for_leader()
    fleet.launch(JOBS_PER_ROUND)
    fleet.wait()
    fleet.check(pair.operators[leader], audit_log)
    (standby,) = set(pair.operators) - {leader}
    written = [
        line
        for line in pair.operators[standby].page("metrics").splitlines()
        if line.startswith("disttrain_api_requests_total") and 'verb="GET"' not in line
    ]
    # At its start it asks what it may do.
    questions = sum(len(verbs) for _, _, verbs in (*RIGHTS, *LEASE_RIGHTS, *HISTORY_RIGHTS, *PROXY_RIGHTS))
    assert written == [f'disttrain_api_requests_total{{code="201",verb="POST"}} {questions}.0']
    spent = {name: state_seconds(pair.operators[name].page("metrics")) for name in pair.operators}
    assert spent[leader] > 0, "the replica that acts counts what jobs spend their time on"
    assert spent[standby] == 0
    assert "stands by" in pair.operators[standby].page("readyz")
    assert pair.operators[standby].health("readyz") == 200
