"""Kueue beside a control plane: its manager as a process, its webhook on loopback, plain pods its one integration."""

from __future__ import annotations

import base64
import json
import os
import shutil
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from tools.cluster.api import wait_for
from tools.cluster.build import path_of, sources_of
from tools.cluster.control_plane import ControlPlane
from tools.cluster.ports import free_port
from tools.cluster.processes import Daemon, ProcessId

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
QUEUES = "/apis/kueue.x-k8s.io/v1beta1"


class Kueue:
    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane, self._api = control_plane, control_plane.api
        self._folder = control_plane.folder / "kueue"
        self._port, self._health = free_port(), free_port()
        self._sources = sources_of("kueue")
        config = self._folder / "config.json"
        command: list[str | Path] = [path_of("kueue"), f"--config={config}", f"--kubeconfig={control_plane.kubeconfig}"]
        self._daemon = Daemon("kueue", command, self._folder, owner=ProcessId.of(os.getpid()))

    def __enter__(self) -> Kueue:
        try:
            self._install()
            self.start()
        except BaseException:
            self._daemon.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._daemon.kill()

    def start(self) -> None:
        """Returns when its webhook answers."""
        self._daemon.start()

        def ready_or_dead() -> bool:
            return not self._daemon.running() or self._ready()

        wait_for(ready_or_dead, 120, lambda: f"Kueue is not ready (log: {self._daemon.log})")
        if not self._daemon.running():
            raise RuntimeError(self._daemon.end_message())

    def kill(self) -> None:
        self._daemon.kill()

    def log(self) -> str:
        return self._daemon.log.read_text(errors="replace")

    # --- queues ---

    def add_flavor(self) -> None:
        self._api.ensure(f"{QUEUES}/resourceflavors", _kueue("ResourceFlavor", "default"))

    def add_queue(self, namespace: str, name: str, cpu: int) -> None:
        """A ClusterQueue with room for so much, that lets the higher priority preempt the lower; and the way to it."""
        cluster_queue = {
            **_kueue("ClusterQueue", f"{namespace}-{name}"),
            "spec": {
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [
                    {
                        "coveredResources": ["cpu"],
                        "flavors": [{"name": "default", "resources": [{"name": "cpu", "nominalQuota": cpu}]}],
                    }
                ],
            },
        }
        self._api.ensure(f"{QUEUES}/clusterqueues", cluster_queue)
        local = {**_kueue("LocalQueue", name), "spec": {"clusterQueue": f"{namespace}-{name}"}}
        self._api.ensure(f"{QUEUES}/namespaces/{namespace}/localqueues", local)

    def workloads(self, namespace: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self._api.get(f"{QUEUES}/namespaces/{namespace}/workloads")["items"]
        return items

    def conditions(self, namespace: str) -> dict[str, list[str]]:
        """What stands on the Workloads of a namespace."""
        return {
            workload["metadata"]["name"]: [
                f"{entry['type']}={entry['status']}: {entry['message']}"
                for entry in workload.get("status", {}).get("conditions", [])
            ]
            for workload in self.workloads(namespace)
        }

    # --- installing ---

    def _install(self) -> None:
        for path in sorted((self._sources / "config/components/crd/bases").glob("*.yaml")):
            self._api.ensure(CRDS, yaml.safe_load(path.read_text()))
        wait_for(self._knows_queues, 60, lambda: "Kueue's kinds are not served")
        self._api.ensure("/api/v1/namespaces", {"metadata": {"name": "kueue-system"}})
        certificate = self._plane.certificate("kueue-webhook", "kueue", "", ["IP:127.0.0.1"])
        self._folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(certificate.certificate, self._folder / "tls.crt")
        shutil.copy(certificate.key, self._folder / "tls.key")
        (self._folder / "config.json").write_text(json.dumps(self._config()))
        for configuration in yaml.safe_load_all(
            (self._sources / "config/components/webhook/manifests.yaml").read_text()
        ):
            kind = configuration["kind"].lower() + "s"
            self._api.ensure(f"/apis/admissionregistration.k8s.io/v1/{kind}", self._on_loopback(configuration))

    def _knows_queues(self) -> bool:
        answer = self._api.ask("GET", QUEUES)
        known = {kind["name"] for kind in answer.json()["resources"]} if answer.status == 200 else set()
        return known >= {"clusterqueues", "localqueues", "resourceflavors", "workloads"}

    def _config(self) -> dict[str, Any]:
        """Its defaults, but for the ports, and the one integration that a plain pod needs."""
        return {
            "apiVersion": "config.kueue.x-k8s.io/v1beta1",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self._health}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": "127.0.0.1", "port": self._port, "certDir": str(self._folder)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["pod"]},
            "featureGates": {"VisibilityOnDemand": False},
        }

    def _on_loopback(self, configuration: dict[str, Any]) -> dict[str, Any]:
        """The webhooks for pods and for Kueue's own kinds, at a URL in place of a Service."""
        root = self._plane.root_certificate.read_bytes()
        kept = []
        for webhook in configuration["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            if path.endswith("--v1-pod") or "-kueue-x-k8s-io-" in path:
                url = f"https://127.0.0.1:{self._port}{path}"
                kept.append({**webhook, "clientConfig": {"url": url, "caBundle": _base64(root)}})
        return {**configuration, "webhooks": kept}

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._health}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def _kueue(kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": kind, "metadata": {"name": name}}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
