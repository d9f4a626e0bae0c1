"""The chart, as the real helm renders it."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.waiting import GENEROUS

CHART = Path(__file__).parents[3] / "helm" / "disttrain"


def run(helm: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *arguments], check=False, capture_output=True, text=True, timeout=GENEROUS)


def render(helm: Path, *settings: str, namespace: str = "system", flags: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All objects of the chart but the CRD, which is slow to read; `settings` are values like `crds.enabled=true`."""
    given = [flag for setting in ("crds.enabled=false", *settings) for flag in ("--set", setting)]
    # Without this a helm that is built from its Go module assumes an old version of Kubernetes.
    done = run(helm, "template", "disttrain", str(CHART), "-n", namespace, "--kube-version", "1.34.0", *given, *flags)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]


def only(objects: list[dict[str, Any]], kind: str, name: str = "disttrain") -> dict[str, Any]:
    named = [document for document in objects if document["kind"] == kind]
    (found,) = [document for document in named if len(named) == 1 or document["metadata"]["name"] == name]
    return found


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def rights(role: dict[str, Any]) -> set[tuple[str, str, tuple[str, ...]]]:
    return {
        (group, resource, tuple(rule["verbs"]))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
