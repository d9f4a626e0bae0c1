"""The chart's roles of tenants on a real API server, as Kubernetes adds them to its own `view` and `edit`."""

import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.operator_process import Team, eventually, install_crd
from tools.cluster.build import ensure
from tools.cluster.control_plane import ControlPlane
from tools.cluster.paths import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "ddp.yaml"


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    """The chart, installed, with a controller manager, which aggregates roles. In `team` ann has `edit`, vic `view`."""
    with ControlPlane(controller_manager=True) as started:
        install_crd(started.api)
        chart = str(REPOSITORY / "helm" / "disttrain")
        helm = [str(ensure(["helm"])["helm"]), f"--kubeconfig={started.kubeconfig}"]
        done = run([*helm, "install", "one", chart, "-n", "ops", "--create-namespace", "--set=crds.enabled=false"])
        assert done.returncode == 0, done.stderr
        for namespace in ("team", "others"):
            Team(started.api, namespace)
        for user, role in (("ann", "edit"), ("vic", "view")):
            binding = {
                "metadata": {"name": user},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
            }
            started.api.ensure("/apis/rbac.authorization.k8s.io/v1/namespaces/team/rolebindings", binding)
        yield started


class User:
    """Somebody with kubectl and a kubeconfig of their own."""

    def __init__(self, cluster: ControlPlane, name: str) -> None:
        self._kubectl = [str(ensure(["kubectl"])["kubectl"]), f"--kubeconfig={cluster.kubeconfig_for(name, name)}"]

    def __call__(self, *arguments: str, namespace: str = "team") -> str:
        done = run([*self._kubectl, "-n", namespace, *arguments])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *arguments: str, namespace: str = "team") -> bool:
        done = run([*self._kubectl, "-n", namespace, *arguments])
        return done.returncode != 0 and "is forbidden" in done.stderr.lower()

    def may(self, verb: str, resource: str, namespace: str = "team", subresource: str = "") -> bool:
        asked = [*self._kubectl, "-n", namespace, "auth", "can-i", verb, resource, f"--subresource={subresource}"]
        return run(asked).stdout.strip() == "yes"


def test_who_may_edit_a_namespace_may_do_with_jobs_what_the_readme_says_alone(cluster):
    """Red where the role may write the status."""
    ann = User(cluster, "ann")
    eventually(lambda: ann.may("create", "disttrainingjobs"))
    ann("apply", "-f", str(EXAMPLE))
    assert "ddp" in ann("get", "dtj", "ddp")
    ann("patch", "dtj", "ddp", "--type=merge", "-p", '{"metadata":{"labels":{"mine":"1"}}}')
    assert ann("get", "dtj", "-l", "mine=1", "-o", "name").strip() == "disttrainingjob.disttrain.io/ddp"
    ann("delete", "dtj", "ddp")
    ann("apply", "-f", str(EXAMPLE))
    ann("delete", "dtj", "--all")
    assert ann.may("get", "pods", subresource="log")

    assert ann.refused("apply", "-f", str(EXAMPLE), namespace="others")
    assert ann.refused("get", "dtj", namespace="others")
    assert ann.may("get", "disttrainingjobs", subresource="status")
    assert not any(ann.may(verb, "disttrainingjobs", subresource="status") for verb in ("update", "patch"))
    assert ann.may("update", "leases"), "which docs/security.md says of the Lease of an operator of single namespaces"
    assert not ann.may("update", "leases", namespace="kube-system")
    assert not ann.may("get", "secrets", namespace="ops")


def test_who_may_view_a_namespace_reads_its_jobs_and_changes_none(cluster: ControlPlane) -> None:
    """Red where the role may patch jobs."""
    Team(cluster.api, "team").create("seen")
    vic = User(cluster, "vic")
    eventually(lambda: vic.may("watch", "disttrainingjobs"))
    assert "seen" in vic("get", "dtj")
    assert vic.refused("delete", "dtj", "seen")
    assert not any(vic.may(verb, "disttrainingjobs") for verb in ("create", "update", "patch", "delete"))
