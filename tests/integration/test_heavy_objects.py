"""Objects of which every field is as large as an API server takes it: nobody else's job is kept from its pods."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.integration import heavy_objects
from tests.integration.attacked import MOST_BYTES, peak_bytes, tracebacks
from tests.integration.heavy_objects import Heavy
from tests.integration.mallory import Mallory
from tests.integration.operator_process import OperatorProcess, Raw, Team, eventually, install_crd, running_operator
from tools.cluster.control_plane import ControlPlane

MOST_OF_ONE = 64 << 20
"""Bytes that one object may take while it is read; the heaviest takes half of it."""


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


@pytest.mark.parametrize(
    ("rows", "figure"),
    [
        (heavy_objects.pods, "disttrain_cached_pods"),
        (heavy_objects.services, None),
        (lambda own: heavy_objects.jobs(), "disttrain_cached_jobs"),
    ],
    ids=["pods", "services", "jobs"],
)
def test_no_field_alone_takes_much(tmp_path: Path, rows: Callable[[Raw], Iterable[Heavy]], figure: str | None) -> None:
    """One operator for all rows: what a row takes is read from the process. Red where a row takes the memory of the
    objects that the whole of it would be, or keeps a job of another tenant from its pods."""
    # An API server of its own: to remove a hundred such objects again takes longer than to start one.
    with ControlPlane() as control_plane:
        install_crd(control_plane.api)
        mallory, good = Mallory(control_plane.api), Team(control_plane.api, "good")
        with running_operator(control_plane, tmp_path) as operator:
            own = mallory.team.create("own")
            mallory.team.wait_for_pods(2)
            most = {}
            for row in rows(own):
                known, before = seen(operator, figure), forget_peak(operator)
                mallory.store_heavy([row])
                eventually(lambda known=known: figure is None or seen(operator, figure) > known, operator.log)
                most[row.name] = peak_bytes(operator) - before
            heaviest = max(most, key=lambda name: most[name])
            print(f"{len(most)} rows; the heaviest, {heaviest}, takes {most[heaviest] >> 20} MiB")
            assert most[heaviest] < MOST_OF_ONE, heaviest
            good.create("alone")
            good.wait_for_pods(2)
            assert not tracebacks(operator), "\n".join(tracebacks(operator))


def seen(operator: OperatorProcess, figure: str | None) -> float:
    """Objects that the operator has taken in, or says that it cannot read."""
    figures = "|".join(filter(None, (figure, r"disttrain_unreadable\w*")))
    return sum(map(float, re.findall(rf"^(?:{figures})(?:{{.*}})? (\S+)$", operator.page("metrics"), re.MULTILINE)))


def forget_peak(operator: OperatorProcess) -> int:
    """Have the process' highest memory begin anew. Returns what it has now."""
    Path(f"/proc/{operator.process.pid}/clear_refs").write_text("5")
    return peak_bytes(operator)
