"""A release of the chart on an API server, and an operator with the account and the flags that the chart gave it."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.integration.operator_process import OperatorProcess, Team
from tools.cluster.build import ensure
from tools.cluster.control_plane import ControlPlane
from tools.cluster.paths import REPOSITORY

CHART = REPOSITORY / "helm" / "disttrain"
# Files and addresses of a pod.
OF_A_POD = ("--health-address", "--health-port")


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
        return self.helm("install", str(CHART), "--create-namespace", *self.flags())

    def apply(self, *templates: str) -> None:
        """As a GitOps controller does, which asks Helm for the text alone: of these templates, of all where none is."""
        chosen = [f"--show-only={template}" for template in templates]
        flags = [*chosen, *self.flags()]
        text = self.helm("template", str(CHART), "--kube-version=1.34.0", "--skip-tests", *flags).stdout
        Team(self.cluster.api, self.namespace)
        kubectl = [str(ensure(["kubectl"])["kubectl"]), f"--kubeconfig={self.cluster.kubeconfig}", "apply", "-f", "-"]
        assert (done := _run(kubectl, text)).returncode == 0, done.stderr

    def succeed(self, command: str, *arguments: str) -> str:
        """What helm says; a refusal fails the test."""
        done = self.helm(command, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def uninstall(self) -> None:
        self.succeed("uninstall")

    def start(self) -> OperatorProcess:
        name = f"{self.name}-disttrain"
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{name}"
        (container,) = self.cluster.api.get(path)["spec"]["template"]["spec"]["containers"]
        flags = [flag for flag in container["args"] if flag.split("=")[0] not in OF_A_POD]
        self.operator = OperatorProcess(self.cluster, self.folder, *flags, f"--kubeconfig={self._account(name)}")
        self.operator.start()
        return self.operator

    def acts(self) -> bool:
        return "disttrain_leader 1.0" in self.operator.page("metrics")

    def describe(self) -> str:
        return self.operator.page("readyz").strip().splitlines()[-1]

    def key(self) -> str:
        secret = f"/api/v1/namespaces/{self.namespace}/secrets/{self.name}-disttrain-job-token-key"
        key: str = self.cluster.api.get(secret)["data"]["key"]
        return key

    def flags(self) -> list[str]:
        """The values, as flags of helm."""
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
