"""etcd and kube-apiserver, with what else of a control plane is asked for, as processes of this machine.

    with ControlPlane(audit_log=folder / "audit.log") as control_plane:
        client = connect(control_plane.kubeconfig)
        control_plane.kill_api_server()
        control_plane.start_api_server()      # the same port, the same data

Several may run at once. If their owner is killed they end with it; their folders go when the next one starts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tools.cluster import commands
from tools.cluster.api import ApiClient, wait_for, write_kubeconfig
from tools.cluster.build import path_of
from tools.cluster.certificates import Authority, Certificate
from tools.cluster.errors import ClusterError
from tools.cluster.fake_nodes import add_fake_nodes, kwok_command
from tools.cluster.ports import free_port
from tools.cluster.processes import Daemon, ProcessId, end_abandoned

_PREFIX = "disttrain-control-plane-"


@dataclass(frozen=True)
class Place:
    """Where a control plane listens and keeps its data; by default on free loopback ports, in a folder that goes."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix=_PREFIX)))
    address: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    etcd_port: int = field(default_factory=free_port)
    etcd_peer_port: int = field(default_factory=free_port)
    temporary: bool = True
    """Ends with the process that started it; a lasting one is stopped by whoever knows its folder."""


class ControlPlane:
    def __init__(
        self,
        *,
        controller_manager: bool = False,
        scheduler: bool = False,
        kwok: bool = False,
        nodes: int = 0,
        audit_log: Path | None = None,
        api_server_flags: Sequence[str] = (),
        controller_manager_flags: Sequence[str] = (),
        place: Place | None = None,
    ) -> None:
        """`nodes` fake ones need `kwok=True`, and pods reach them only with `scheduler=True` (or by spec.nodeName)."""
        self.place = place or Place()
        self.folder = self.place.folder
        self.url = f"https://{self.place.address}:{self.place.port}"
        self.kubeconfig = self.folder / "kubeconfig"
        self.audit_log = audit_log
        self._nodes = nodes if kwok else 0
        self._authority = Authority(self.folder / "certificates")
        self._admin = self._authority.issue("admin", "disttrain-admin", "system:masters")
        self.api = ApiClient(self.url, self._authority.root.certificate, self._admin)
        self.etcd = self._daemon("etcd", commands.etcd(self.place.etcd_port, self.place.etcd_peer_port, self.folder))
        self.api_server = self._daemon("kube-apiserver", self._api_server(controller_manager, api_server_flags))
        self._others: list[Daemon] = []
        if controller_manager:
            self._others.append(self._daemon("kube-controller-manager", self._controller(controller_manager_flags)))
        if scheduler:
            config = self.kubeconfig_for("kube-scheduler", "system:kube-scheduler")
            self._others.append(self._daemon("kube-scheduler", commands.scheduler(config)))
        if kwok:
            self._others.append(self._daemon("kwok", kwok_command(self.kubeconfig)))

    # --- life ---

    def __enter__(self) -> ControlPlane:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts what does not run yet and returns when the API server is ready."""
        if self.place.temporary:
            end_abandoned()
            _remove_abandoned()
            (self.folder / "owner").write_text(_own_id().text())
        write_kubeconfig(self.kubeconfig, self.url, self._authority.root.certificate, self._admin)
        self.start_etcd()
        self.start_api_server()
        for daemon in self._others:
            daemon.start()
        add_fake_nodes(self.api, self._nodes)

    def stop(self) -> None:
        for daemon in reversed(self.daemons()):
            daemon.kill() if self.place.temporary else daemon.stop()
        if self.place.temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def daemons(self) -> Sequence[Daemon]:
        return [self.etcd, self.api_server, *self._others]

    # --- faults ---

    def kill_api_server(self) -> None:
        self.api_server.kill()

    def start_api_server(self) -> None:
        self.api_server.start()
        self._wait(self.api_server)

    def kill_etcd(self) -> None:
        self.etcd.kill()

    def start_etcd(self) -> None:
        """Returns at once: whoever needs etcd answers through the API server waits for that."""
        self.etcd.start()

    def wait_until_ready(self) -> None:
        self._wait(self.api_server)

    def _wait(self, daemon: Daemon, seconds: float = 120) -> None:
        def ready_or_dead() -> bool:
            return self.api.ready() or not daemon.running() or not self.etcd.running()

        wait_for(ready_or_dead, seconds, lambda: f"the API server is not ready after {seconds:g} s (log: {daemon.log})")
        for part in (self.etcd, daemon):
            if not part.running():
                raise ClusterError(part.end_message())

    # --- identities ---

    def certificate(self, name: str, user: str, group: str = "", alternative_names: Sequence[str] = ()) -> Certificate:
        return self._authority.issue(name, user, group, alternative_names)

    @property
    def root_certificate(self) -> Path:
        return self._authority.root.certificate

    def kubeconfig_for(self, name: str, user: str, group: str = "") -> Path:
        path = self.folder / f"{name}.kubeconfig"
        write_kubeconfig(path, self.url, self.root_certificate, self.certificate(name, user, group))
        return path

    # --- commands ---

    def _daemon(self, name: str, arguments: Sequence[str | Path]) -> Daemon:
        owner = _own_id() if self.place.temporary else None
        return Daemon(name, [path_of(name), *arguments], self.folder, owner=owner)

    def _api_server(self, service_accounts: bool, extra: Sequence[str]) -> list[str | Path]:
        names = ["DNS:localhost", "DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc"]
        addresses = [f"IP:{address}" for address in {"127.0.0.1", "10.96.0.1", self.place.address}]
        return [
            *commands.api_server(
                address=self.place.address,
                port=self.place.port,
                etcd_port=self.place.etcd_port,
                folder=self.folder,
                root=self.root_certificate,
                serving=self.certificate("kube-apiserver", "kube-apiserver", "", [*names, *sorted(addresses)]),
                to_kubelets=self.certificate("apiserver-kubelet", "apiserver-kubelet", "system:masters"),
                tokens=self._authority.key_pair("service-accounts"),
            ),
            *([] if service_accounts else ["--disable-admission-plugins=ServiceAccount"]),
            *(commands.audit(self.audit_log) if self.audit_log else []),
            *extra,
        ]

    def _controller(self, extra: Sequence[str]) -> list[str | Path]:
        config = self.kubeconfig_for("kube-controller-manager", "system:kube-controller-manager")
        tokens = self._authority.key_pair("service-accounts")
        return [*commands.controller_manager(config, self.root_certificate, tokens), *extra]


def _own_id() -> ProcessId:
    process = ProcessId.of(os.getpid())
    assert process is not None
    return process


def _remove_abandoned() -> None:
    """The folders of control planes whose owner was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            owner = ProcessId.parse((folder / "owner").read_text())
            if owner is not None and not owner.alive():
                shutil.rmtree(folder, ignore_errors=True)
