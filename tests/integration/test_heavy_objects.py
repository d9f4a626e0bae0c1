"""Objects of which every field is as large as an API server takes it: nobody else's job is kept from its pods."""

from pathlib import Path

from tests.integration import heavy_objects
from tests.integration.attacked import MOST_BYTES, peak_bytes, tracebacks
from tests.integration.mallory import Mallory
from tests.integration.operator_process import OperatorProcess, Team, running_operator
from tools.cluster.control_plane import ControlPlane


def test_all_fields_at_once_keep_nobody_from_its_pods(control_plane: ControlPlane, tmp_path: Path) -> None:
    mallory, good = Mallory(control_plane.api), Team(control_plane.api, "good")

    def serves(operator: OperatorProcess, *, pods: int) -> None:
        good.create(f"job-{pods}")
        good.wait_for_pods(pods)
        assert not tracebacks(operator), "\n".join(tracebacks(operator))
        assert peak_bytes(operator) < MOST_BYTES

    with running_operator(control_plane, tmp_path) as operator:
        own = mallory.team.create("own")
        mallory.store_heavy(heavy_objects.all_at_once((*heavy_objects.children(own), *heavy_objects.jobs())))
        assert len(mallory.stored) == 7, mallory.stored
        serves(operator, pods=2)
    with running_operator(control_plane, tmp_path) as new:
        serves(new, pods=4)
