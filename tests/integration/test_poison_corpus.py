"""Two tenants, the gate on, two replicas of which the leader is killed now and then: one tenant makes everything of
poison_corpus.py, and the other's jobs run as if it were not there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import poison_corpus
from tests.integration.attacked import GATE, MOST_BYTES, Good, Pair, peak_bytes, tracebacks
from tests.integration.mallory import Mallory
from tests.integration.operator_process import LEASE, OperatorProcess, eventually
from tools.cluster.control_plane import ControlPlane

pytestmark = pytest.mark.timeout(3600)


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
