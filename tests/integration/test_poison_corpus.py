"""Two tenants, the gate on, two replicas of which the leader is killed now and then: one tenant makes everything of
poison_corpus.py, and the other's jobs run as if it were not there."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.api import ApiClient
from tests.cluster.control_plane import ControlPlane
from tests.integration import poison_corpus
from tests.integration.mallory import Mallory
from tests.integration.operator_process import LEASE, OperatorProcess, Team, eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

GATE = {"schedulingPolicy": {"gangScheduler": "Gate"}, "cleanPodPolicy": "All"}
MOST_BYTES = 512 << 20
"""The chart's limit on the operator's memory."""


class Pair:
    """Two replicas with the gate on."""

    def __init__(self, control_plane: ControlPlane, folder: Path) -> None:
        self.operators = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            flags = ("--leader-elect", f"--replica-name={name}", "--gang-gate", "--lease-namespace=default")
            self.operators.append(OperatorProcess(control_plane, folder / name, *flags))

    def kill_the_leader(self) -> None:
        """SIGKILL, once one leads; it is started again at once."""
        leader = eventually(self._leader, self.logs)
        leader.kill()
        leader.start(wait=False)

    def _leader(self) -> OperatorProcess | None:
        for operator in self.operators:
            if operator.health("readyz") and "disttrain_leader 1.0" in operator.page("metrics"):
                return operator
        return None

    def logs(self) -> str:
        return "\n".join(operator.log()[-3000:] for operator in self.operators)


def tracebacks(operator: OperatorProcess) -> list[str]:
    """Every different error that nobody foresaw, with the line before it."""
    parts = re.findall(r"^(.*)\nTraceback .*\n((?:[ \t].*\n)+)(\S.*)$", operator.log(), re.MULTILINE)
    return sorted({f"{before[-200:]} ... {frames[-400:]} {error[:300]}" for before, frames, error in parts})


def peak_bytes(operator: OperatorProcess) -> int:
    """The most memory that the process has had."""
    assert operator.process is not None
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{operator.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.fixture(scope="module")
def control_plane() -> Iterator[ControlPlane]:
    with ControlPlane(controller_manager=True, scheduler=True, kwok=True, nodes=2) as started:
        yield started


@pytest.fixture
def mallory(control_plane: ControlPlane) -> Mallory:
    """With everything stored that the definition of today would refuse."""
    tenant = Mallory(control_plane.api)
    tenant.store_jobs()
    return tenant


class Good:
    """The other tenant: gangs of two pods, one after the other."""

    def __init__(self, api: ApiClient) -> None:
        self.team = Team(api, "good")
        self._numbers = itertools.count()
        self.names: list[str] = []

    def launch(self, count: int) -> None:
        for _ in range(count):
            name = f"good-{next(self._numbers)}"
            self.team.create(name, runPolicy=GATE)
            self.names.append(name)

    def all_run(self, why: Any) -> None:
        def running() -> bool:
            return all(self.team.condition("Running", name)["status"] == "True" for name in self.names)

        eventually(running, lambda: [self._story(), why()], pause=0.2)

    def all_end_well(self) -> None:
        """Let their pods end. No attempt was lost on the way."""
        self.team.finish([pod for pod in self.team.pods(1) if "deletionTimestamp" not in pod["metadata"]])
        for name in self.names:
            self.team.wait_for("Complete", name=name)
            status = self.team.status(name)
            assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", 1, 0), status

    def _story(self) -> object:
        return {name: self.team.condition("Running", name) for name in self.names}


def test_a_tenant_that_makes_everything_costs_the_other_nothing(
    control_plane: ControlPlane, mallory: Mallory, tmp_path: Path
) -> None:
    api, good = control_plane.api, Good(control_plane.api)
    pair = Pair(control_plane, tmp_path)
    try:
        for operator in pair.operators:
            operator.start()
        good.launch(2)
        good.all_run(pair.logs)
        pair.kill_the_leader()

        own = mallory.team.create(poison_corpus.OWN, runPolicy=GATE)
        good.launch(2)
        mallory.store_children(own)
        pair.kill_the_leader()
        good.launch(2)
        good.all_run(pair.logs)

        reports = list(poison_corpus.reports())
        mallory.report(reports)
        pair.kill_the_leader()
        good.launch(2)
        good.all_run(pair.logs)
        good.all_end_well()
        for poison in reports:
            assert mallory.team.wait_for("Failed", name=poison.name)["message"], "its own failure is still its own"

        assert len(set(mallory.stored)) >= 60, len(set(mallory.stored))
        for operator in pair.operators:
            assert not tracebacks(operator), "\n".join(tracebacks(operator))
            eventually(operator.ready, operator.log)
            assert peak_bytes(operator) < MOST_BYTES
    finally:
        for operator in pair.operators:
            operator.kill()
        api.ask("DELETE", LEASE)

    # Who comes new to all of this serves, too.
    (tmp_path / "fresh").mkdir()
    fresh = OperatorProcess(control_plane, tmp_path / "fresh", "--gang-gate")
    try:
        fresh.start()
        good.launch(1)
        good.names = good.names[-1:]
        good.all_run(fresh.log)
        good.all_end_well()
        assert not tracebacks(fresh), "\n".join(tracebacks(fresh))
        assert peak_bytes(fresh) < MOST_BYTES
    finally:
        fresh.kill()
