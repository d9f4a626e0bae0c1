"""A real cluster with the real images and the chart installed by helm; a fresh namespace for each test."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import USER_CODE
from tools.cluster import build
from tools.cluster.full import kubeconfig_path
from tools.cluster.images import references
from tools.cluster.locks import exclusive

ROOT = Path(__file__).parents[2]
SYSTEM = "disttrain-system"
OPERATOR_IMAGE, TRAINER_IMAGE = (references()[name] for name in ("operator", "trainer"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            # The first one waits until all programs and images are built, beside all other tests.
            item.add_marker(pytest.mark.timeout(3600))
    # Before anything is installed for all others.
    items.sort(key=lambda item: item.get_closest_marker("bare_cluster") is None)


def cluster_command(*arguments: str) -> str:
    """Output of `python -m tools.cluster …`; its one line of explanation fails the test."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.cluster", *arguments], check=False, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, f"python -m tools.cluster {' '.join(arguments)} ended with {done.returncode}"
    return done.stdout


@pytest.fixture(scope="session")
def kubeconfig() -> Iterator[Path]:
    """The cluster: KUBECONFIG's, or one on this machine, which goes away again if it was not there before."""
    owner = ("--owner", str(os.getpid()))
    # Tests of another clone would install their own release over this one.
    with exclusive("end-to-end"):
        try:
            yield Path(cluster_command("up", *owner).strip().splitlines()[-1])
        finally:
            cluster_command("down", *owner)


@pytest.fixture(scope="session")
def images(kubeconfig: Path) -> None:
    """Both images, built from the Dockerfiles, on every node."""
    cluster_command("images")


@pytest.fixture(scope="session")
def programs() -> dict[str, Path]:
    return build.ensure(["kubectl", "helm"])


@pytest.fixture(scope="session")
def helm(programs: dict[str, Path], kubeconfig: Path) -> "Helm":
    return Helm(programs["helm"], kubeconfig)


class Helm:
    """helm against the cluster."""

    def __init__(self, program: Path, kubeconfig: Path) -> None:
        self._program, self._kubeconfig = program, kubeconfig

    def __call__(self, *arguments: str) -> str:
        environment = os.environ | {"KUBECONFIG": str(self._kubeconfig)}
        done = subprocess.run(
            [str(self._program), *arguments], check=False, capture_output=True, text=True, env=environment, timeout=400
        )
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def install(self, *settings: str) -> None:
        """Install or upgrade the chart with the test's images, and wait until the operator is ready."""
        values = list(settings)
        for section, image in (("image", OPERATOR_IMAGE), ("trainer.image", TRAINER_IMAGE)):
            repository, _, tag = image.rpartition(":")
            values = [f"{section}.repository={repository}", f"{section}.tag={tag}", *values]
        flags = [flag for value in values for flag in ("--set", value)]
        where = ("disttrain", str(ROOT / "helm" / "disttrain"), "-n", SYSTEM, "--create-namespace")
        self("upgrade", "--install", *where, *flags, "--wait", "--timeout", "300s")


@pytest.fixture(scope="session")
def operator(images: None, helm: Helm, programs: dict[str, Path], kubeconfig: Path) -> Iterator[Kubectl]:
    """The chart, installed. Answers with kubectl in the operator's namespace."""
    # A cluster that stays may hold the release of tests that were killed, and an upgrade of a pending one is refused.
    helm("uninstall", "disttrain", "-n", SYSTEM, "--ignore-not-found", "--wait")
    helm.install()
    kubectl = Kubectl(programs["kubectl"], kubeconfig, SYSTEM)
    yield kubectl
    kubectl.run("delete", "dtj", "--all", "--all-namespaces", "--timeout=120s", timeout=150)
    helm("uninstall", "disttrain", "-n", SYSTEM, "--wait")
    kubectl.run("delete", "crd", "disttrainingjobs.disttrain.io", "--timeout=60s")
    kubectl.run("delete", "namespace", SYSTEM, "--timeout=120s", timeout=150)


@pytest.fixture
def of_this_machine(kubeconfig: Path) -> None:
    """Nodes whose processes the test sees."""
    if kubeconfig != kubeconfig_path():
        pytest.skip(
            "the nodes of the cluster that tools/cluster starts are processes of this machine, KUBECONFIG's not"
        )


@pytest.fixture
def kubectl(operator: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a fresh namespace that enforces the restricted Pod Security Standard."""
    with fresh_namespace(operator, "test") as kubectl:
        kubectl("create", "configmap", USER_CODE, f"--from-file={Path(__file__).with_name('slow_data.py')}")
        kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
        yield kubectl


@pytest.fixture
def elsewhere(operator: Kubectl) -> Iterator[Kubectl]:
    """kubectl in the fresh namespace of a stranger."""
    with fresh_namespace(operator, "stranger") as kubectl:
        yield kubectl


@contextmanager
def fresh_namespace(kubectl: Kubectl, prefix: str) -> Iterator[Kubectl]:
    """kubectl in a namespace that is deleted at the end."""
    fresh = replace(kubectl, namespace=f"{prefix}-{uuid.uuid4().hex[:8]}")
    fresh("create", "namespace", fresh.namespace)
    try:
        yield fresh
    finally:
        fresh.run("delete", "namespace", fresh.namespace, "--wait=false")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """The operator never logs a traceback, whatever the test did to it."""
    operator = item.funcargs.get("operator") if isinstance(item, pytest.Function) else None
    if isinstance(operator, Kubectl):
        log = operator.run("logs", "-l", "app.kubernetes.io/name=disttrain-operator", "--tail=-1").stdout
        assert "Traceback" not in log, log[-4000:]
