"""The dashboard of a cluster as a process, and viewers: service accounts with rights in some namespaces."""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.operator_process import Raw
from tests.waiting import until
from tools.cluster.api import ApiClient
from tools.cluster.control_plane import ControlPlane
from tools.cluster.processes import dying_with_parent

ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}"
RULES = [
    {"apiGroups": ["disttrain.io"], "resources": ["disttrainingjobs"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["get", "list"]},
]
"""All but logs."""


@contextmanager
def running_dashboard(control_plane: ControlPlane, folder: Path, *flags: str) -> Iterator[str]:
    """Its address, while it runs."""
    command = [sys.executable, "-m", "disttrain.dashboard.in_cluster", "--address=127.0.0.1", "--port=0"]
    command += [f"--server={control_plane.url}", f"--ca-file={control_plane.root_certificate}", *flags]
    log = folder / "dashboard.log"
    with log.open("w") as output, subprocess.Popen(dying_with_parent(command), stderr=output) as process:
        try:
            match = until(lambda: re.search(r"serving at port (\d+)", log.read_text()), log.read_text)
            yield f"http://127.0.0.1:{match[1]}/"
        finally:
            process.kill()


def ask(address: str, path: str, token: str = "") -> tuple[int, Any]:
    """Status and JSON of an answer."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def a_viewer(api: ApiClient, namespace: str, name: str) -> str:
    """The token of a service account that may see the jobs of its namespace."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    api.ensure("/api/v1/namespaces", {"metadata": {"name": namespace}})
    api.ensure(accounts, {"metadata": {"name": name}})
    api.ensure(f"{ROLES.format(namespace)}/roles", {"metadata": {"name": name}, "rules": RULES})
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }
    api.ensure(f"{ROLES.format(namespace)}/rolebindings", binding)
    answer = api.ask("POST", f"{accounts}/{name}/token", {"spec": {"expirationSeconds": 3600}})
    assert answer.status == 201, answer.body
    return str(answer.json()["status"]["token"])


def progress(api: ApiClient, namespace: str, name: str, phase: str, step: int) -> None:
    """Set a job's status, as the operator does."""
    known = {"step": step, "totalSteps": 100, "loss": 1 / step, "updateTime": "2026-01-01T12:00:00Z"}
    status: Raw = {"phase": phase, "attempt": 1, "progress": known}
    path = f"/apis/disttrain.io/v1alpha1/namespaces/{namespace}/disttrainingjobs/{name}/status"
    answer = api.ask("PATCH", path, {"status": status})
    assert answer.status == 200, answer.body
