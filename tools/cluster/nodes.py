"""A node: a kubelet and a containerd of its own, in a folder of its own. Several share one machine.

One containerd must not serve two kubelets: each would remove the other's pods.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from tools.cluster import cgroups
from tools.cluster.api import ApiClient, wait_for
from tools.cluster.build import path_of
from tools.cluster.control_plane import ControlPlane
from tools.cluster.errors import MissingError
from tools.cluster.network import DNS_SERVICE, plugged_into
from tools.cluster.paths import IMAGE_TAG, TEMPLATES, state_folder
from tools.cluster.processes import Daemon, marked
from tools.cluster.shell import succeeds


def image_reference(name: str) -> str:
    """Return the full form of the image's name, by which containerd knows it."""
    return f"docker.io/disttrain/{name}:{IMAGE_TAG}"


@dataclass(frozen=True)
class Node:
    name: str
    index: int

    @property
    def folder(self) -> Path:
        return state_folder() / self.name

    @property
    def address(self) -> str:
        return f"172.30.{self.index}.1"

    @property
    def link(self) -> str:
        """The interface that has the node's address."""
        return f"kc{self.index}"

    @property
    def bridge(self) -> str:
        """The interface that its pods are plugged into."""
        return f"cni{self.index}"

    @property
    def pod_addresses(self) -> str:
        return f"10.244.{self.index}.0/24"

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"

    @property
    def health_port(self) -> int:
        return 10248 + 20 * self.index

    @property
    def cgroup(self) -> str:
        return f"{cgroups.ROOT}/{self.name}"

    # --- its two daemons ---

    @property
    def containerd(self) -> Daemon:
        return Daemon("containerd", ["containerd", "--config", self.folder / "containerd.toml"], self.folder)

    def kubelet(self, kubeconfig: Path) -> Daemon:
        command: Sequence[str | Path] = [
            path_of("kubelet"),
            f"--config={self.folder / 'kubelet.yaml'}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--cert-dir={self.folder / 'kubelet' / 'pki'}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
        ]
        return Daemon("kubelet", command, self.folder)

    # --- life ---

    def start_containerd(self, root_certificate: Path) -> None:
        """Alone first: the kubelet finds the pause image there when it starts."""
        self.write_configs(root_certificate)
        cgroups.make(self.cgroup)
        self.containerd.start()
        answers = ["ctr", "--address", str(self.socket), "version"]
        wait_for(lambda: succeeds(answers), 60, self.containerd.end_message, pause=0.2)

    def start_kubelet(self, control_plane: ControlPlane) -> None:
        identity = control_plane.kubeconfig_for(self.name, f"system:node:{self.name}", "system:nodes")
        self.kubelet(identity).start()

    def kill(self) -> None:
        """As a power cut does it: nothing leaves its pods any more, and its daemons, its shims and the processes of its
        pods end, all by SIGKILL. Peers therefore see no connection close."""
        for link in plugged_into([self.bridge]):
            # It may go by itself meanwhile, with its pod.
            succeeds(["ip", "link", "set", link, "down"])
        for name in ("kubelet", "containerd"):
            Daemon(name, [], self.folder).kill()
        for one in list(marked(self.folder)):
            one.process.end(grace=0)
        cgroups.kill(self.cgroup)

    def ready(self, api: ApiClient) -> bool:
        """Also by its own word: for a while, the API server holds a dead node's last one to be true."""
        return answers_ok(f"http://127.0.0.1:{self.health_port}/healthz") and self._called_ready(api)

    def _called_ready(self, api: ApiClient) -> bool:
        answer = api.ask("GET", f"/api/v1/nodes/{self.name}")
        conditions = answer.json()["status"].get("conditions", []) if answer.status == 200 else []
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def write_configs(self, root_certificate: Path) -> None:
        (self.folder / "cni").mkdir(parents=True, exist_ok=True)
        values = {
            "name": self.name,
            "folder": self.folder,
            "socket": self.socket,
            "address": self.address,
            "kubelet_port": 10250 + 10 * self.index,
            "health_port": self.health_port,
            "bridge": self.bridge,
            "pod_addresses": self.pod_addresses,
            "cgroup": self.cgroup,
            "pause_image": image_reference("pause"),
            "cni_plugins": cni_plugins(),
            "dns_service": DNS_SERVICE,
            "root_certificate": root_certificate,
        }
        for template, target in (("containerd.toml", ""), ("kubelet.yaml", ""), ("cni.conflist", "cni")):
            (self.folder / target / template).write_text(filled(template, **values))


NODES = (Node("node1", 0), Node("node2", 1))


def filled(template: str, **values: object) -> str:
    return Template((TEMPLATES / template).read_text()).substitute(values)


def answers_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def cni_plugins() -> Path:
    """Debian's package and the upstream archive put them into different folders."""
    for folder in (Path("/usr/lib/cni"), Path("/opt/cni/bin")):
        if (folder / "bridge").exists():
            return folder
    raise MissingError("the CNI plugins are missing: `bash .ci/install-debian cluster` installs what is needed")
