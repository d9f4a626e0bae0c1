"""All attacks of poison_corpus.py and heavy_objects.py at once, beside a crowd that is refused its pods, while leaders
are killed: another tenant's gangs run, and no operator takes more memory than its chart allows."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration import heavy_objects, poison_corpus
from tests.integration.attacked import GATE, MOST_BYTES, Good, Pair, peak_bytes, tracebacks
from tests.integration.mallory import Mallory
from tests.integration.operator_process import Team, eventually
from tools.cluster.control_plane import ControlPlane

pytestmark = pytest.mark.timeout(3600)

CROWD = 60
"""Jobs that may have no pod."""


@pytest.fixture(scope="module")
def control_plane() -> Iterator[ControlPlane]:
    with ControlPlane(controller_manager=True, scheduler=True, kwok=True, nodes=2) as started:
        yield started


class Crowd:
    """Jobs in a namespace whose quota is full."""

    def __init__(self, team: Team) -> None:
        self._team = team
        path = f"/api/v1/namespaces/{team.namespace}/resourcequotas"
        team.ask("POST", path, {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
        eventually(lambda: (team.api.get(f"{path}/none").get("status") or {}).get("hard"))

    def come(self) -> None:
        """Each asks, for a day, for what it may not have."""
        for number in range(CROWD):
            self._team.create(f"crowd-{number}", runPolicy={"startingDeadlineSeconds": 86_400})


def test_all_attacks_at_once_and_kills_keep_the_other_from_no_pod(control_plane: ControlPlane, tmp_path: Path) -> None:
    mallory, good = Mallory(control_plane.api), Good(control_plane.api)
    mallory.store_jobs()
    crowd, pair = Crowd(Team(control_plane.api, "crowd")), Pair(control_plane, tmp_path)
    peaks: list[int] = []

    def the_other_is_served() -> None:
        good.launch(1)
        good.all_run(pair.logs)
        good.all_end_well()
        good.names.clear()
        peaks.extend(peak_bytes(operator) for operator in pair.operators)

    try:
        for operator in pair.operators:
            operator.start()
        own = mallory.team.create(poison_corpus.OWN, runPolicy=GATE)
        heavy = heavy_objects.all_at_once((*heavy_objects.children(own), *heavy_objects.jobs()))
        with ThreadPoolExecutor(2) as attackers:
            under_way = [attackers.submit(crowd.come), attackers.submit(mallory.store_heavy, heavy)]
            mallory.store_children(own)
            pair.kill_the_leader()
            the_other_is_served()
        for attack in under_way:
            attack.result()
        reports = list(poison_corpus.reports())
        mallory.report(reports)
        pair.kill_the_leader()
        the_other_is_served()
        for poison in reports:
            assert mallory.team.wait_for("Failed", name=poison.name)["message"], "its own failure is still its own"
        assert len(set(mallory.stored)) > 95, len(set(mallory.stored))
        assert not [error for operator in pair.operators for error in tracebacks(operator)]
        print(f"an operator's highest memory: {max(peaks) >> 20} of {MOST_BYTES >> 20} MiB")
        assert max(peaks) < MOST_BYTES
    finally:
        for operator in pair.operators:
            operator.kill()
