"""Two releases of the chart on one API server, each operator with the account and the flags that its chart gave it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.operator_process import Team, eventually
from tests.integration.release import CHART, Release
from tools.cluster.control_plane import ControlPlane

LEASE = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/disttrain-operator"


@pytest.fixture
def releases(control_plane: ControlPlane, tmp_path: Path) -> Iterator[list[Release]]:
    """What a test appends is removed after it."""
    kept: list[Release] = []
    yield kept
    for release in kept:
        if release.operator is not None:
            release.operator.kill()
        release.helm("uninstall", "--ignore-not-found")
    for namespace in ("kube-system", "two-teams", "apart-a", "apart-b"):
        control_plane.api.ask("DELETE", LEASE.format(namespace))


def test_helm_refuses_a_second_release_of_the_same_jobs_and_removes_the_lease_with_the_first(
    control_plane: ControlPlane, tmp_path: Path, releases: list[Release]
) -> None:
    first, second = Release(control_plane, tmp_path, "one", "ops"), Release(control_plane, tmp_path, "two", "tests")
    releases += [first, second]
    assert (done := first.install()).returncode == 0, done.stderr
    first.start()
    eventually(first.acts, first.describe)
    refused = second.install()
    assert refused.returncode != 0
    assert "release ops/one serves all namespaces already: uninstall it first, or give each" in refused.stderr
    assert (again := first.helm("upgrade", str(CHART), *first.flags())).returncode == 0, again.stderr
    assert eventually(first.acts)
    first.uninstall()
    assert control_plane.api.ask("GET", LEASE.format("kube-system")).status == 404
    first.operator.stop()
    assert control_plane.api.ask("GET", LEASE.format("kube-system")).status == 404, "nobody makes it again"


def test_a_second_release_that_helm_did_not_refuse_stands_by_and_says_so(control_plane, tmp_path, releases):
    first, second = Release(control_plane, tmp_path, "one", "ops"), Release(control_plane, tmp_path, "two", "tests")
    releases += [first, second]
    assert first.install().returncode == 0
    second.apply()
    second.apply()
    first.start()
    eventually(first.acts, first.describe)
    second.start()
    eventually(lambda: "release ops/one serves the same jobs; uninstall one of the two releases" in second.describe())
    assert "release ops/one serves the same jobs" in second.operator.log()
    assert first.acts()
    assert not second.acts()
    # Each has made the Secret with its key, which nobody renders.
    keys = {release.key() for release in releases}
    assert len(keys) == 2
    second.apply()
    assert {release.key() for release in releases} == keys


def test_a_release_of_several_namespaces_serves_these_and_no_other_and_shares_none(control_plane, tmp_path, releases):
    mine, also_mine, others = (Team(control_plane.api, name) for name in ("apart-a", "apart-b", "apart-c"))
    both = Release(control_plane, tmp_path, "one", "ops", ("watchNamespaces={apart-b,apart-a}",))
    one = Release(control_plane, tmp_path, "two", "tests", ("watchNamespaces={apart-b}",))
    releases += [both, one]
    assert (done := both.install()).returncode == 0, done.stderr
    both.start()
    eventually(both.acts, both.describe)
    for team in (others, mine, also_mine):
        team.create()
    eventually(lambda: len(mine.pods()) == len(also_mine.pods()) == 2, both.describe)
    assert others.pods() == []

    refused = one.install()
    assert "release ops/one serves namespace apart-b already" in refused.stderr
    one.apply()
    one.start()
    eventually(lambda: "release ops/one serves the same jobs" in one.describe(), one.describe)
    assert both.acts()

    for team in (mine, also_mine):
        team.finish(team.pods())
        team.wait_for("Finished")
        assert team.status()["phase"] == "Succeeded"
    both.uninstall()
    both.operator.stop()
    assert control_plane.api.ask("GET", LEASE.format("apart-a")).status == 404
