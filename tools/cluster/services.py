"""What a cluster offers its pods besides nodes: Services (kube-proxy), names (CoreDNS) and shared folders."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.cluster.api import ApiClient, Json
from tools.cluster.build import path_of
from tools.cluster.control_plane import ControlPlane
from tools.cluster.network import DNS_SERVICE, POD_ADDRESSES
from tools.cluster.nodes import Node, answers_ok, filled
from tools.cluster.paths import REPOSITORY, state_folder
from tools.cluster.processes import Daemon


def kube_proxy(control_plane: ControlPlane, node: Node) -> Daemon:
    """One is enough for all nodes, as they share the machine's network."""
    return Daemon(
        "kube-proxy",
        [
            path_of("kube-proxy"),
            f"--kubeconfig={control_plane.kubeconfig_for('kube-proxy', 'system:kube-proxy')}",
            f"--hostname-override={node.name}",
            "--proxy-mode=iptables",
            f"--cluster-cidr={POD_ADDRESSES}",
            "--nodeport-addresses=primary",
            "--iptables-localhost-nodeports=false",
            "--healthz-bind-address=127.0.0.1:10256",
            "--metrics-bind-address=127.0.0.1:10249",
            "--conntrack-max-per-core=0",  # a setting of the whole machine: let it be
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ],
        state_folder(),
    )


def coredns(control_plane: ControlPlane, node: Node) -> Daemon:
    """As a process of the machine on a node's address: there is no image of it, and it needs none."""
    corefile = state_folder() / "Corefile"
    corefile.write_text(filled("Corefile", address=node.address, kubeconfig=control_plane.kubeconfig))
    return Daemon("coredns", [path_of("coredns"), "-conf", corefile], state_folder())


def coredns_ready(node: Node) -> bool:
    return answers_ok(f"http://{node.address}:8181/ready")


def publish_dns(api: ApiClient, node: Node) -> None:
    api.ensure("/api/v1/namespaces/kube-system/services", _dns_service())
    api.ensure("/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices", _dns_endpoints(node.address))


def _dns_service() -> Json:
    ports = [{"name": p.lower(), "protocol": p, "port": 53} for p in ("UDP", "TCP")]
    return {"metadata": {"name": "kube-dns"}, "spec": {"clusterIP": DNS_SERVICE, "ports": ports}}


def _dns_endpoints(address: str) -> Json:
    return {
        "metadata": {"name": "kube-dns", "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "ports": [{"name": p.lower(), "protocol": p, "port": 53} for p in ("UDP", "TCP")],
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
    }


def provisioner(control_plane: ControlPlane) -> Daemon:
    where = {"PYTHONPATH": str(REPOSITORY)}
    certificates = control_plane.folder / "certificates"
    arguments = [control_plane.url, certificates, state_folder() / "volumes"]
    command: list[str | Path] = [sys.executable, "-m", "tools.cluster.provisioner", *map(str, arguments)]
    return Daemon("provisioner", command, state_folder(), environment=where)
