"""What two pages of docs/ tell people to type, as it stands, on a cluster that has nothing of disttrain's."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documented import commands_on_a_cluster, notes_commands
from tools.cluster.paths import REPOSITORY

pytestmark = pytest.mark.bare_cluster
SECONDS = 2400
"""More than the longest `--timeout` of the page."""


class Shell:
    """A user's terminal: bash in a clone, with kubectl and helm, and the cluster as kubectl's current one."""

    def __init__(self, programs: dict[str, Path], kubeconfig: Path) -> None:
        path = os.pathsep.join([*(str(program.parent) for program in programs.values()), os.environ["PATH"]])
        self._environment = os.environ | {"PATH": path, "KUBECONFIG": str(kubeconfig)}

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            check=False,
            cwd=REPOSITORY,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def __call__(self, command: str) -> str:
        done = self.run(command)
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        return done.stdout


# As clusters that are shared have it. The nodes of the test cluster are one machine: without a limit, each rank would
# take all of its cores, beside all other tests.
ONE_CORE = """
apiVersion: v1
kind: LimitRange
metadata: {name: one-core, namespace: default}
spec: {limits: [{type: Container, default: {cpu: "1"}, defaultRequest: {cpu: 100m}}]}
"""


@pytest.fixture
def shell(kubeconfig: Path, programs: dict[str, Path]) -> Iterator[Shell]:
    shell = Shell(programs, kubeconfig)
    shell(f"kubectl apply -f - <<'END'{ONE_CORE}END")
    yield shell
    # Where the page's last commands were not reached.
    for command in (
        "kubectl delete limitrange one-core -n default --ignore-not-found",
        "kubectl delete dtj ddp --ignore-not-found --timeout=120s",
        "helm uninstall disttrain -n disttrain --ignore-not-found --wait",
        "kubectl delete crd disttrainingjobs.disttrain.io --ignore-not-found --timeout=60s",
        "kubectl delete namespace disttrain --ignore-not-found --timeout=120s",
    ):
        shell.run(command)


def test_the_pages_work_as_they_stand(shell: Shell, programs: dict[str, Path], kubeconfig: Path) -> None:
    assert "disttrain" not in shell("kubectl get crd -o name"), "the cluster is to have nothing"
    outputs = {command: shell(command) for command in commands_on_a_cluster()}
    shown = outputs["kubectl get dtj ddp"].splitlines()
    assert shown[0].split() == ["NAME", "PHASE", "REASON", "READY", "ETA", "RESTARTS", "AGE"]
    assert shown[1].split()[:3] == ["ddp", "Succeeded", "WorkersSucceeded"]
    assert outputs["kubectl get pods -n disttrain"].count("Running") == 2
    install = next(text for command, text in outputs.items() if command.startswith("helm install"))
    assert [line.strip() for line in install.splitlines() if line.startswith("  kubectl")] == notes_commands()
    assert "disttrain" not in shell("kubectl get crd,namespaces,clusterroles -o name")
