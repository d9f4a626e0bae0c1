"""The full cluster: a control plane, two nodes, Services, names, shared storage. `up` ensures each part in turn; a part
that already runs is left alone, so that the same list of steps starts a cluster and repairs one."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tools.cluster import leftovers, network, node_images, preflight, provisioner, services
from tools.cluster.api import wait_for
from tools.cluster.build import Log, ensure
from tools.cluster.control_plane import ControlPlane, Place
from tools.cluster.errors import ClusterError, MissingError
from tools.cluster.locks import exclusive
from tools.cluster.nodes import NODES, Node
from tools.cluster.paths import PACKAGE, state_folder
from tools.cluster.processes import Daemon, ProcessId
from tools.cluster.programs import CLUSTER

# Nobody else is given these: neither by ports.py nor by `disttrain run`.
API_SERVER_PORT = 6443
ETCD_PORTS = (11_790, 11_800)


def kubeconfig_path() -> Path:
    return state_folder() / "control-plane" / "kubeconfig"


def up(log: Log, owner: ProcessId | None = None) -> Path:
    """A healthy cluster, whatever was there before; returns its kubeconfig.

    With `owner` a cluster that had to be started belongs to that process: if it dies without `down`, the next `up`
    takes nothing over of what it left, neither pods nor what is in etcd.
    """
    preflight.check()
    ensure(CLUSTER, log)
    with exclusive("cluster"):
        if reason := why_replaced():
            log(f"{reason}: it is replaced")
            leftovers.remove()
        if warning := preflight.room_warning():
            log(f"warning: {warning}")
        if owner and not state_folder().exists():
            take(owner)
        try:
            return _ensure_all(log)
        except MissingError:
            raise
        except ClusterError as trouble:
            if not _fingerprint_file().exists():
                raise
            log(f"the running cluster cannot be repaired ({trouble}): it is replaced")
            last = _owner()
            leftovers.remove()
            if last:
                take(last)
            return _ensure_all(log)


def down(owner: ProcessId | None = None) -> bool:
    """With `owner`: only if the cluster is that process's. Whether it was taken down."""
    with exclusive("cluster"):
        if owner and _owner() != owner:
            return False
        leftovers.remove()
        return True


def status() -> list[str]:
    """One line for each daemon, by its pid file."""
    files = [*state_folder().glob("*.pid"), *state_folder().glob("*/*.pid")]
    return [_daemon_line(file) for file in sorted(files)] or ["no cluster"]


def _daemon_line(pid_file: Path) -> str:
    process = Daemon(pid_file.stem, [], pid_file.parent).running()
    return f"{pid_file.parent.name}/{pid_file.stem}: " + (
        f"runs as process {process.pid}" if process else "does not run"
    )


def kill_node(name: str) -> None:
    _node(name).kill()


def start_node(name: str) -> None:
    node = _node(name)
    control_plane = _control_plane()
    node.start_containerd(control_plane.root_certificate)
    node.start_kubelet(control_plane)
    _wait_for_node(control_plane, node)


def _node(name: str) -> Node:
    for node in NODES:
        if node.name == name:
            return node
    raise ClusterError(f"there is no node {name!r}: there are {', '.join(node.name for node in NODES)}")


def _control_plane() -> ControlPlane:
    """On a node's address, as pods have to reach it, and on fixed ports, as a later process has to find it."""
    place = Place(
        folder=state_folder() / "control-plane",
        address=NODES[0].address,
        port=API_SERVER_PORT,
        etcd_port=ETCD_PORTS[0],
        etcd_peer_port=ETCD_PORTS[1],
        temporary=False,
    )
    return ControlPlane(controller_manager=True, scheduler=True, place=place)


def _ensure_all(log: Log) -> Path:
    state_folder().mkdir(parents=True, exist_ok=True)
    sign()
    for node in NODES:
        network.add_link(node.link, node.address)
    network.forward(state_folder())
    control_plane = _control_plane()
    log("control plane")
    control_plane.start()
    log("nodes")
    node_images.write_pause_image()
    for node in NODES:
        node.start_containerd(control_plane.root_certificate)
    node_images.load(["pause"])
    for node in NODES:
        node.start_kubelet(control_plane)
    _start_services(control_plane)
    for node in NODES:
        _wait_for_node(control_plane, node)
    return control_plane.kubeconfig


def _start_services(control_plane: ControlPlane) -> None:
    home = NODES[0]
    provisioner.ensure_class(control_plane.api)
    services.publish_dns(control_plane.api, home)
    dns = services.coredns(control_plane, home)
    for daemon in (services.kube_proxy(control_plane, home), dns, services.provisioner(control_plane)):
        daemon.start()
    wait_for(lambda: services.coredns_ready(home), 60, lambda: f"CoreDNS does not get ready (log: {dns.log})")


def _wait_for_node(control_plane: ControlPlane, node: Node) -> None:
    log = node.folder / "kubelet.log"
    wait_for(lambda: node.ready(control_plane.api), 120, lambda: f"{node.name} does not get ready (log: {log})", 0.2)


def _fingerprint_file() -> Path:
    return state_folder() / "made-by"


def _fingerprint() -> str:
    """Digest of what decides how the cluster's programs are started: a change of it makes another cluster."""
    digest = hashlib.sha256()
    modules = [PACKAGE / f"{name}.py" for name in ("commands", "control_plane", "full", "nodes", "network", "services")]
    for path in sorted([*modules, *PACKAGE.glob("templates/*"), *PACKAGE.glob("tools/*/go.mod")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _owner_file() -> Path:
    return state_folder() / "owner"


def _owner() -> ProcessId | None:
    return ProcessId.parse(_owner_file().read_text()) if _owner_file().exists() else None


def take(owner: ProcessId) -> None:
    """The cluster that is to be started here is this process's."""
    state_folder().mkdir(parents=True, exist_ok=True)
    _owner_file().write_text(owner.text())


def sign() -> None:
    """Write down which code starts it."""
    _fingerprint_file().write_text(_fingerprint())


def why_replaced() -> str | None:
    """Why what is there of a cluster is not taken over; None where it is, or where there is nothing."""
    if not state_folder().exists():
        return None
    if not _fingerprint_file().exists() or _fingerprint_file().read_text() != _fingerprint():
        return "the cluster was started by another version of tools/cluster"
    if (owner := _owner()) and not owner.alive():
        return f"the cluster was left by process {owner.pid}, which ended without taking it down"
    return None
