"""Two releases of the chart on one API server, each operator with the account and the flags that its chart gave it."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.cluster.build import ensure
from tests.cluster.control_plane import ControlPlane
from tests.cluster.paths import REPOSITORY
from tests.integration.operator_process import OperatorProcess, Team, eventually, install_crd

CHART = REPOSITORY / "helm" / "disttrain"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/disttrain-operator"
# Files and addresses of a pod.
OF_A_POD = ("--health-address", "--health-port")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with ControlPlane() as started:
        install_crd(started.api)
        yield started


@dataclass
class Release:
    """A release, and one replica of its operator once that is started."""

    cluster: ControlPlane
    folder: Path
    name: str
    namespace: str
    values: tuple[str, ...] = ()
    operator: OperatorProcess | None = None

    def helm(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        given = [str(ensure(["helm"])["helm"]), f"--kubeconfig={self.cluster.kubeconfig}", "-n", self.namespace]
        return _run([*given, command, self.name, *arguments])

    def install(self) -> subprocess.CompletedProcess[str]:
        return self.helm("install", str(CHART), "--create-namespace", *self._values())

    def apply(self) -> None:
        """As a GitOps controller does, which asks Helm for the text alone."""
        text = self.helm("template", str(CHART), "--kube-version=1.34.0", *self._values()).stdout
        Team(self.cluster.api, self.namespace)
        kubectl = [str(ensure(["kubectl"])["kubectl"]), f"--kubeconfig={self.cluster.kubeconfig}", "apply", "-f", "-"]
        assert (done := _run(kubectl, text)).returncode == 0, done.stderr

    def uninstall(self) -> None:
        assert (done := self.helm("uninstall")).returncode == 0, done.stderr

    def start(self) -> OperatorProcess:
        name = f"{self.name}-disttrain"
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{name}"
        (container,) = self.cluster.api.get(path)["spec"]["template"]["spec"]["containers"]
        flags = [flag for flag in container["args"] if flag.split("=")[0] not in OF_A_POD]
        self.operator = OperatorProcess(self.cluster, self.folder, *flags, f"--kubeconfig={self._account(name)}")
        self.operator.start()
        return self.operator

    def acts(self) -> bool:
        assert self.operator is not None
        return "disttrain_leader 1.0" in self.operator.page("metrics")

    def says(self) -> str:
        assert self.operator is not None
        return self.operator.page("readyz").strip().splitlines()[-1]

    def key(self) -> str:
        secret = f"/api/v1/namespaces/{self.namespace}/secrets/{self.name}-disttrain-job-token-key"
        key: str = self.cluster.api.get(secret)["data"]["key"]
        return key

    def _values(self) -> list[str]:
        return [f"--set={value}" for value in ("crds.enabled=false", *self.values)]

    def _account(self, name: str) -> Path:
        """A kubeconfig with the rights of the release's service account."""
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{name}/token"
        token = self.cluster.api.ask("POST", path, {"spec": {}}).json()["status"]["token"]
        config = yaml.safe_load(self.cluster.kubeconfig.read_text())
        for entry in config["users"]:
            entry["user"] = {"token": token}
        written = self.folder / f"{self.namespace}-{self.name}.kubeconfig"
        written.write_text(yaml.safe_dump(config))
        return written


def _run(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, check=False, capture_output=True, text=True, timeout=300)


@pytest.fixture
def releases(cluster: ControlPlane, tmp_path: Path) -> Iterator[list[Release]]:
    """What a test appends is removed after it."""
    kept: list[Release] = []
    yield kept
    for release in kept:
        if release.operator is not None:
            release.operator.kill()
        release.helm("uninstall", "--ignore-not-found")
    for namespace in ("kube-system", "two-teams"):
        cluster.api.ask("DELETE", LEASE.format(namespace))


def test_helm_refuses_a_second_release_of_the_same_jobs_and_removes_the_lease_with_the_first(
    cluster: ControlPlane, tmp_path: Path, releases: list[Release]
) -> None:
    first, second = Release(cluster, tmp_path, "one", "ops"), Release(cluster, tmp_path, "two", "tests")
    releases += [first, second]
    assert (done := first.install()).returncode == 0, done.stderr
    first.start()
    eventually(first.acts, first.says)
    refused = second.install()
    assert refused.returncode != 0
    assert "release ops/one serves all namespaces already: uninstall it first, or give each release a" in refused.stderr
    assert (again := first.helm("upgrade", str(CHART), *first._values())).returncode == 0, again.stderr
    assert eventually(first.acts)
    first.uninstall()
    assert cluster.api.ask("GET", LEASE.format("kube-system")).status == 404
    assert first.operator is not None
    first.operator.stop()
    assert cluster.api.ask("GET", LEASE.format("kube-system")).status == 404, "nobody makes it again"


def test_a_second_release_that_helm_did_not_refuse_stands_by_and_says_so(
    cluster: ControlPlane, tmp_path: Path, releases: list[Release]
) -> None:
    first, second = Release(cluster, tmp_path, "one", "ops"), Release(cluster, tmp_path, "two", "tests")
    releases += [first, second]
    assert first.install().returncode == 0
    second.apply()
    second.apply()
    first.start()
    eventually(first.acts, first.says)
    second.start()
    eventually(lambda: "release ops/one serves the same jobs; uninstall one of the two releases" in second.says())
    assert second.operator is not None
    assert "release ops/one serves the same jobs" in second.operator.log()
    assert first.acts()
    assert not second.acts()
    # Each has made the Secret with its key, which nobody renders.
    keys = {release.key() for release in releases}
    assert len(keys) == 2
    second.apply()
    assert {release.key() for release in releases} == keys


def test_a_release_of_one_namespace_acts_unless_one_of_all_does(
    cluster: ControlPlane, tmp_path: Path, releases: list[Release]
) -> None:
    team = Team(cluster.api, "two-teams")
    narrow = Release(cluster, tmp_path, "two", "two-teams", ("watchNamespace=two-teams",))
    wide = Release(cluster, tmp_path, "one", "ops")
    releases += [narrow, wide]
    assert (done := narrow.install()).returncode == 0, done.stderr
    narrow.start()
    eventually(narrow.acts, narrow.says)
    team.create("before")
    eventually(lambda: len(team.pods()) == 2, team.pods)

    assert (done := wide.install()).returncode == 0, done.stderr
    wide.start()
    eventually(wide.acts, wide.says)
    eventually(lambda: not narrow.acts(), narrow.says)
    eventually(lambda: "release ops/one serves all namespaces, and so this one's" in narrow.says(), narrow.says)
    team.create("amid")
    eventually(lambda: len(team.pods()) == 4, team.pods)
    assert wide.acts()
    assert not narrow.acts()

    wide.uninstall()
    assert wide.operator is not None
    wide.operator.stop()
    eventually(narrow.acts, narrow.says)
    team.create("after")
    eventually(lambda: len(team.pods()) == 6, team.pods)
