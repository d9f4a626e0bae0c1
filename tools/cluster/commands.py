"""The command lines of the control plane's programs."""

from __future__ import annotations

from pathlib import Path

from tools.cluster.certificates import Certificate
from tools.cluster.paths import TEMPLATES

SERVICE_ADDRESSES = "10.96.0.0/16"

Arguments = list[str | Path]


def etcd(port: int, peer_port: int, folder: Path) -> Arguments:
    """Without fsync: a test's data need not outlive the machine, only the process, and the page cache does that."""
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_server(
    *,
    address: str,
    port: int,
    etcd_port: int,
    folder: Path,
    root: Path,
    serving: Certificate,
    to_kubelets: Certificate,
    tokens: Certificate,
) -> Arguments:
    # A loopback address cannot stand in the endpoints of the Service `kubernetes`; then the server keeps none.
    endpoints = ["--endpoint-reconciler-type=none"] if address.startswith("127.") else []
    return [
        f"--bind-address={address}",
        f"--advertise-address={address}",
        f"--secure-port={port}",
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        f"--cert-dir={folder / 'certificates'}",
        f"--client-ca-file={root}",
        f"--tls-cert-file={serving.certificate}",
        f"--tls-private-key-file={serving.key}",
        f"--kubelet-client-certificate={to_kubelets.certificate}",
        f"--kubelet-client-key={to_kubelets.key}",
        # Without it exec and logs fail: a node's name resolves nowhere.
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={tokens.certificate}",
        f"--service-account-signing-key-file={tokens.key}",
        f"--service-cluster-ip-range={SERVICE_ADDRESSES}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged",
        *endpoints,
    ]


def audit(log: Path) -> Arguments:
    return [
        f"--audit-policy-file={TEMPLATES / 'audit-policy.yaml'}",
        f"--audit-log-path={log}",
        "--audit-log-mode=blocking",
    ]


def controller_manager(kubeconfig: Path, root: Path, tokens: Certificate) -> Arguments:
    return [
        *_client(kubeconfig),
        f"--root-ca-file={root}",
        f"--service-account-private-key-file={tokens.key}",
        # Each controller as its own account: the manager's own may do next to nothing.
        "--use-service-account-credentials",
    ]


def scheduler(kubeconfig: Path) -> Arguments:
    return _client(kubeconfig)


def _client(kubeconfig: Path) -> Arguments:
    """It serves no port and, being the only one, elects no leader."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--secure-port=0",
        "--leader-elect=false",
    ]
