"""The chart's life on a real API server: install, upgrade to a newer version, rollback, uninstall, install again.

The newer version is this one with a field more in the status, and it has written words that this one does not know.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.operator_process import JOBS, Raw, Team, eventually, install_crd
from tests.integration.release import CHART, Release
from tests.waiting import GENEROUS
from tools.cluster.build import ensure
from tools.cluster.control_plane import ControlPlane

TEAM = "life"
DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/disttrainingjobs.disttrain.io"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with ControlPlane() as started:
        yield started


@pytest.fixture
def release(cluster: ControlPlane, tmp_path: Path) -> Iterator[Release]:
    made = Release(cluster, tmp_path, "one", "ops", ("crds.enabled=true",))
    yield made
    if made.operator is not None:
        made.operator.kill()


def newer_chart(folder: Path) -> Path:
    """The chart of a version to come, whose status has a field more."""
    chart = folder / "newer"
    shutil.copytree(CHART, chart)
    about = chart / "Chart.yaml"
    about.write_text(about.read_text().replace("0.1.0", "0.2.0"))
    definition = chart / "templates" / "crd.yaml"
    text = definition.read_text()
    inside = "          status:\n            description:"
    assert text.count(inside) == 1
    before, after = text.split(inside)
    fields = "            properties:\n"
    after = after.replace(fields, f"{fields}              mood: {{type: string}}\n", 1)
    definition.write_text(before + inside + after)
    return chart


def test_a_rollback_keeps_the_jobs_and_statuses_that_a_newer_version_has_stored(cluster, tmp_path, release):
    api = cluster.api
    assert (done := release.install()).returncode == 0, done.stderr
    assert "watches all namespaces" in done.stdout
    eventually(lambda: api.ask("GET", "/apis/disttrain.io/v1alpha1/disttrainingjobs").status == 200)
    release.start()
    eventually(release.acts, release.describe)
    key = release.key()
    team = Team(api, TEAM)
    team.create("kept")
    eventually(lambda: len(team.pods()) == 2, team.pods)
    pods = {pod["metadata"]["uid"] for pod in team.pods()}

    release.succeed("upgrade", str(newer_chart(tmp_path)), *release.flags())
    release.operator.stop()
    path = f"{JOBS.format(TEAM)}/kept"
    eventually(lambda: _put_status(cluster, path, mood="curious", phase="Contemplating").get("mood") == "curious")

    release.succeed("rollback")
    eventually(lambda: "mood" not in _status_fields(api.get(DEFINITION)))
    release.start()
    eventually(release.acts, release.describe)
    assert release.key() == key
    team.create("after")
    eventually(lambda: len(team.pods()) == 4, team.pods)
    assert pods < {pod["metadata"]["uid"] for pod in team.pods()}, "the running job was left alone"
    assert api.get(path)["status"]["restarts"] == 0

    release.uninstall()
    release.operator.stop()
    assert len(api.get(JOBS.format(TEAM))["items"]) == 2, "the definition is kept, and with it the jobs"
    assert (done := release.install()).returncode == 0, done.stderr
    release.start()
    eventually(release.acts, release.describe)
    assert release.key() == key
    assert pods < {pod["metadata"]["uid"] for pod in team.pods()}


def test_a_definition_that_somebody_applied_is_taken_over_as_the_page_says(tmp_path: Path) -> None:
    page = (CHART.parents[1] / "docs" / "installing.md").read_text()
    with ControlPlane() as cluster:
        release = Release(cluster, tmp_path, "disttrain", "disttrain", ("crds.enabled=true",))
        kubectl = [str(ensure(["kubectl"])["kubectl"]), f"--kubeconfig={cluster.kubeconfig}"]
        install_crd(cluster.api)
        refused = release.install()
        assert refused.returncode != 0
        assert "exists and cannot be imported into the current release: invalid ownership metadata" in refused.stderr
        commands = [line.split()[1:] for line in page.splitlines() if line.startswith("kubectl ") and " crd " in line]
        for command in commands[:2]:
            subprocess.run([*kubectl, *command], check=True, capture_output=True, timeout=GENEROUS)
        assert (done := release.install()).returncode == 0, done.stderr
        release.uninstall()
        other = Release(cluster, tmp_path, "other", "elsewhere", ("crds.enabled=true",))
        assert "invalid ownership metadata" in other.install().stderr, "it was kept, and is the first one's"
        other.succeed("install", str(CHART), "--create-namespace", "--take-ownership", *other.flags())
        owner = cluster.api.get(DEFINITION)["metadata"]["annotations"]["meta.helm.sh/release-name"]
        assert owner == "other"


def _put_status(cluster: ControlPlane, path: str, **fields: str) -> Raw:
    """The stored status, after an attempt to change it: definitions take a moment to have an effect."""
    job = cluster.api.get(path)
    job["status"].update(fields)
    answer = cluster.api.ask("PUT", f"{path}/status", job)
    status: Raw = answer.json()["status"] if answer.status == 200 else {}
    return status


def _status_fields(definition: Raw) -> Raw:
    (version,) = definition["spec"]["versions"]
    fields: Raw = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    return fields
