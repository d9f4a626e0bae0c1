"""The operator as a process, and a namespace in which a test plays user and kubelet."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import merge
from tests.soak import SOAK
from tests.waiting import GENEROUS
from tools.cluster.api import ApiClient
from tools.cluster.control_plane import ControlPlane
from tools.cluster.paths import OPERATOR_PATH, REPOSITORY
from tools.cluster.ports import free_port
from tools.cluster.processes import dying_with_parent

Raw = dict[str, Any]

CRD = REPOSITORY / "crds" / "disttrain.io_disttrainingjobs.yaml"
JOBS = "/apis/disttrain.io/v1alpha1/namespaces/{}/disttrainingjobs"
LIVES_LONGER = 1.3 if SOAK else 1.6
"""How many times as long an operator lives that is killed again and again, until it gets through."""


LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/disttrain-operator"


def install_crd(api: ApiClient) -> None:
    """Returns when jobs can be listed."""
    api.ensure("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", yaml.safe_load(CRD.read_text()))
    eventually(lambda: api.ask("GET", "/apis/disttrain.io/v1alpha1/disttrainingjobs").status == 200)


def remove_jobs(api: ApiClient) -> None:
    """Removes all jobs, pods and Services, whoever holds them, and the lease of the operator that made them. Only where
    no operator runs."""
    for collection in ("apis/disttrain.io/v1alpha1/disttrainingjobs", "api/v1/pods", "api/v1/services"):
        group, plural = collection.rsplit("/", 1)
        for item in _items(api, collection):
            metadata = item["metadata"]
            path = f"/{group}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}"
            if metadata.get("finalizers"):
                api.ask("PATCH", path, {"metadata": {"finalizers": None}})
            api.ask("DELETE", path, {"gracePeriodSeconds": 0})
        assert _items(api, collection) == []
    api.ask("DELETE", LEASE)


def _items(api: ApiClient, collection: str) -> list[Raw]:
    """All but the API server's own Service. An object, also its managedFields, may nest deeper than Python reads by
    default."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(100 * usual)
    try:
        return [item for item in api.get(f"/{collection}")["items"] if item["metadata"]["name"] != "kubernetes"]
    finally:
        sys.setrecursionlimit(usual)


def eventually(
    condition: Callable[[], Any],
    why: Callable[[], object] = lambda: "",
    *,
    pause: float = 0.02,
    seconds: float = GENEROUS,
) -> Any:
    """The first true answer of `condition`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer = condition()
        except OSError:  # the API server is being restarted
            answer = None
        if answer:
            return answer
        assert time.monotonic() < deadline, f"still not so after {seconds} s: {why()}"
        time.sleep(pause)


class OperatorProcess:
    """`disttrain-operator` against a control plane."""

    def __init__(self, control_plane: ControlPlane, folder: Path, *flags: str) -> None:
        self._port = free_port()
        self._log = folder / f"operator-{self._port}.log"
        self._command = [sys.executable, "-m", "disttrain_operator", f"--kubeconfig={control_plane.kubeconfig}"]
        # Processes that work for the same control plane have one key, as in a cluster.
        key = folder / "token-key"
        key.write_text("one key for the tokens of all jobs of this folder")
        in_secret = any(flag.startswith("--token-key-secret") for flag in flags)
        self._command += [
            "--health-address=127.0.0.1",
            f"--health-port={self._port}",
            *([] if in_secret else [f"--token-key-file={key}"]),
            *flags,
        ]
        self._command = dying_with_parent(self._command)
        self._environment = os.environ | {"PYTHONPATH": OPERATOR_PATH}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where health and metrics are."""
        return f"127.0.0.1:{self._port}"

    def start(self, *, wait: bool = True) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stderr=log, env=self._environment)
        if wait:
            eventually(self.ready, self.log)

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log()
        return self.health("readyz") == 200

    def health(self, page: str) -> int:
        """Status code of a health page; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/{page}", timeout=GENEROUS) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def page(self, name: str) -> str:
        """Text of a health page, or of /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/{name}", timeout=GENEROUS) as answer:
            text: str = answer.read().decode()
        return text

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(GENEROUS)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(GENEROUS)

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


@contextmanager
def running_operator(control_plane: ControlPlane, folder: Path, *flags: str) -> Iterator[OperatorProcess]:
    """An operator that is ready, and ends with the block."""
    operator = OperatorProcess(control_plane, folder, *flags)
    try:
        operator.start()
        yield operator
    finally:
        operator.kill()


def a_spec(**changes: Any) -> Raw:
    """Two pods with a command of their own: nothing of the trainer's is asked."""
    container = {"name": "trainer", "image": "registry.example/train:1", "command": ["train"]}
    base = {"workers": {"replicas": 2, "template": {"spec": {"containers": [container]}}}}
    return merge(base, changes)


@dataclass
class Team:
    """A namespace. The test creates jobs as a user would, and sets the statuses of pods as a kubelet would."""

    api: ApiClient
    namespace: str

    def __post_init__(self) -> None:
        self.api.ensure("/api/v1/namespaces", {"metadata": {"name": self.namespace}})

    # The user.

    def create(self, name: str = "job", **spec: Any) -> Raw:
        manifest = {
            "apiVersion": "disttrain.io/v1alpha1",
            "kind": "DistTrainingJob",
            "metadata": {"name": name},
            "spec": a_spec(**spec),
        }
        return self.ask("POST", f"{JOBS.format(self.namespace)}?fieldValidation=Strict", manifest)

    def patch(self, name: str = "job", **spec: Any) -> Raw:
        return self.ask("PATCH", f"{JOBS.format(self.namespace)}/{name}", {"spec": spec})

    def delete(self, name: str = "job") -> None:
        self.ask("DELETE", f"{JOBS.format(self.namespace)}/{name}")

    def ask(self, method: str, path: str, body: Raw | None = None) -> Raw:
        """Refusals fail the test; an API server that is away is waited for."""
        answer = eventually(lambda: self.api.ask(method, path, body))
        assert answer.status < 300, f"{method} {path}: {answer.status} {answer.body.decode()}"
        parsed: Raw = answer.json()
        return parsed

    # What stands there.

    def children(self, plural: str) -> list[Raw]:
        items: list[Raw] = self.api.get(f"/api/v1/namespaces/{self.namespace}/{plural}")["items"]
        return sorted(items, key=lambda raw: str(raw["metadata"]["name"]))

    def pods(self, attempt: int | None = None) -> list[Raw]:
        found = self.children("pods")
        if attempt is None:
            return found
        return [pod for pod in found if pod["metadata"].get("labels", {}).get("disttrain.io/attempt") == str(attempt)]

    def status(self, name: str = "job") -> Raw:
        raw: Raw = self.api.get(f"{JOBS.format(self.namespace)}/{name}")
        return raw.get("status") or {}

    def exists(self, name: str = "job") -> bool:
        return self.api.ask("GET", f"{JOBS.format(self.namespace)}/{name}").status == 200

    def condition(self, type_: str, name: str = "job") -> Raw:
        found = [entry for entry in self.status(name).get("conditions", []) if entry["type"] == type_]
        return found[0] if found else {"status": "Unknown", "reason": "", "message": ""}

    # Waiting.

    def wait_for_pods(self, count: int, attempt: int = 1) -> list[Raw]:
        eventually(lambda: len(self.pods(attempt)) == count, lambda: [self._names(), self.status()])
        return self.pods(attempt)

    def wait_for(self, type_: str, *, status: str = "True", reason: str | None = None, name: str = "job") -> Raw:
        def holds() -> bool:
            found = self.condition(type_, name)
            return found["status"] == status and reason in (None, found["reason"])

        eventually(holds, lambda: [self.status(name), self._names()])
        return self.condition(type_, name)

    def _names(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods()]

    # The kubelet, and the pod garbage collector.

    def collect_garbage(self) -> None:
        """A DELETE whose caller dies can leave an unscheduled pod terminating; a cluster's pod collector ends it."""
        for pod in self.pods():
            if "deletionTimestamp" in pod["metadata"]:
                path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"
                self.api.ask("DELETE", path, {"gracePeriodSeconds": 0})

    def run(self, pods: list[Raw]) -> None:
        for pod in pods:
            self._set(pod, "Running", {"running": {"startedAt": _now()}})

    def finish(self, pods: list[Raw], code: int = 0, message: str = "") -> None:
        for pod in pods:
            state = {"exitCode": code, "finishedAt": _now(), "reason": "Completed" if code == 0 else "Error"}
            self._set(pod, "Failed" if code else "Succeeded", {"terminated": {**state, "message": message}})

    def _set(self, pod: Raw, phase: str, state: Raw) -> None:
        container = {
            "name": "trainer",
            "image": "registry.example/train:1",
            "imageID": "",
            "ready": phase == "Running",
            "restartCount": 0,
            "state": state,
        }
        self.set_status(pod, {"phase": phase, "containerStatuses": [container]})

    def set_status(self, pod: Raw, status: Raw) -> None:
        """A pod that was deleted meanwhile is passed by, as a kubelet does."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}/status"
        answer = eventually(lambda: self.api.ask("PATCH", path, {"status": status}))
        assert answer.status in (200, 404), f"{path}: {answer.status} {answer.body.decode()}"


def a_team(control_plane: ControlPlane, request: pytest.FixtureRequest) -> Team:
    """A namespace named after the test."""
    name = request.node.name.removeprefix("test_").replace("_", "-").replace("[", "-").replace("]", "")
    return Team(control_plane.api, name[-63:].strip("-").lower())


def kubeconfig_with_rights(
    control_plane: ControlPlane, user: str, rights: Iterable[tuple[str, str, Iterable[str]]]
) -> Path:
    """Credentials of a user who has these rights and no others: group, resource and verbs of each."""
    rules = [{"apiGroups": [group], "resources": [resource], "verbs": list(verbs)} for group, resource, verbs in rights]
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    binding = {
        "metadata": {"name": user},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user},
        "subjects": [{"kind": "User", "name": user}],
    }
    control_plane.api.ensure(f"{rbac}/clusterroles", {"metadata": {"name": user}, "rules": rules})
    control_plane.api.ensure(f"{rbac}/clusterrolebindings", binding)
    return control_plane.kubeconfig_for(user, user)


def killed_until(operator: OperatorProcess, team: Team, done: Callable[[], bool]) -> None:
    """Kill the operator again and again, a little later after its start each time, until it got through."""
    lifetime = 0.002
    while not done():
        operator.start(wait=False)
        eventually(operator.ready, operator.log, pause=0.001)
        time.sleep(lifetime)
        operator.kill()
        team.collect_garbage()
        # In small steps where things happen; on a slow machine they happen later.
        lifetime *= LIVES_LONGER


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
