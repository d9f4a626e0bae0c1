"""Where the API server is and who we are: the pod's service account, or a kubeconfig.

`Access` holds the parts, as they stand in files or in the kubeconfig, because two clients use them: ours and kopf's.
Tokens are asked for with every request and read again from their file as it rotates.
"""

import base64
import json
import os
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from disttrain_api import yaml_bounds
from disttrain_operator.kube.errors import AccessError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# A projected token is replaced at 80 % of its life of an hour or more.
_REREAD_SECONDS = 30.0

Token = Callable[[], str | None]


@dataclass(frozen=True)
class Access:
    """An API server and credentials for it. Certificates and keys are PEM."""

    server: str
    token: Token = lambda: None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    insecure: bool = False
    namespace: str = "default"

    def ssl_context(self) -> ssl.SSLContext | None:
        """None for a plain http:// server."""
        if not self.server.startswith("https:"):
            return None
        context = ssl.create_default_context(cadata=self.ca)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate and self.key:
            # The ssl module reads client certificates from files only.
            with tempfile.TemporaryDirectory() as folder:
                certificate, key = Path(folder, "certificate.pem"), Path(folder, "key.pem")
                certificate.write_text(self.certificate)
                key.touch(mode=0o600)
                key.write_text(self.key)
                context.load_cert_chain(certificate, key)
        return context


def find_access(kubeconfig: str | None = None, context: str | None = None) -> Access:
    """The kubeconfig that is named; else the pod's service account; else KUBECONFIG or ~/.kube/config."""
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists():
        return in_cluster()
    named = kubeconfig or os.environ.get("KUBECONFIG", "").split(os.pathsep)[0]
    return from_kubeconfig(Path(named or Path.home() / ".kube" / "config"), context)


def in_cluster(folder: Path = SERVICE_ACCOUNT) -> Access:
    """The service account of the pod that this process runs in."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    namespace = folder / "namespace"
    return Access(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        token=FileToken(folder / "token"),
        ca=(folder / "ca.crt").read_text(),
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
    )


def from_kubeconfig(path: Path, context: str | None = None) -> Access:
    """A context of a kubeconfig file; None: its current one."""
    try:
        config = yaml_bounds.load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"no service account and no readable kubeconfig at {path}: {error}") from error
    except yaml_bounds.YamlError as error:
        raise AccessError(f"{path} is no kubeconfig: {error}") from error
    chosen = context or (config or {}).get("current-context")
    entry = _named(config, "contexts", chosen, "context", path)
    cluster = _named(config, "clusters", entry.get("cluster"), "cluster", path)
    user = _named(config, "users", entry["user"], "user", path) if entry.get("user") else {}
    return Access(
        server=str(cluster["server"]).rstrip("/"),
        token=_token(user, path.parent),
        ca=_pem(cluster, "certificate-authority", path.parent),
        certificate=_pem(user, "client-certificate", path.parent),
        key=_pem(user, "client-key", path.parent),
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
        namespace=entry.get("namespace") or "default",
    )


class FileToken:
    """A token in a file that somebody else rotates."""

    def __init__(self, path: Path) -> None:
        self._path, self._value, self._read_at = path, "", float("-inf")

    def __call__(self) -> str:
        now = time.monotonic()
        if now - self._read_at > _REREAD_SECONDS:
            self._value, self._read_at = self._path.read_text().strip(), now
        return self._value


class ExecToken:
    """A token printed by a credential plugin (client.authentication.k8s.io), kept until shortly before it expires."""

    def __init__(self, plugin: Mapping[str, Any], folder: Path) -> None:
        command = str(plugin["command"])
        self._command = [shutil.which(command) or str(folder / command), *(plugin.get("args") or [])]
        info = {"apiVersion": plugin.get("apiVersion"), "kind": "ExecCredential", "spec": {"interactive": False}}
        extra = {entry["name"]: entry["value"] for entry in plugin.get("env") or []}
        self._environment = os.environ | extra | {"KUBERNETES_EXEC_INFO": json.dumps(info)}
        self._value, self._expires_at = "", float("-inf")

    def __call__(self) -> str:
        if time.time() > self._expires_at - 60:
            self._refresh()
        return self._value

    def _refresh(self) -> None:
        # Blocks the loop for as long as the plugin runs: once per life of a token, and never inside a cluster.
        try:
            printed = subprocess.run(self._command, env=self._environment, capture_output=True, check=True, timeout=60)
            status = json.loads(printed.stdout)["status"]
            self._value = status["token"]
        except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
            raise AccessError(f"credential plugin {self._command[0]} gave no token: {error}") from error
        expires = status.get("expirationTimestamp")
        self._expires_at = datetime.fromisoformat(expires).timestamp() if expires else float("inf")


def _token(user: Mapping[str, Any], folder: Path) -> Token:
    if user.get("token"):
        token = str(user["token"])
        return lambda: token
    if user.get("tokenFile"):
        return FileToken(folder / user["tokenFile"])
    if user.get("exec"):
        return ExecToken(user["exec"], folder)
    if user.get("auth-provider") or user.get("username"):
        raise AccessError("auth-provider and password users of a kubeconfig are not supported: use an exec plugin")
    return lambda: None


def _named(config: Any, section: str, name: str | None, key: str, path: Path) -> dict[str, Any]:
    for entry in (config or {}).get(section) or []:
        if entry.get("name") == name:
            return entry.get(key) or {}
    raise AccessError(f"{path} has no {key} named {name!r}")


def _pem(section: Mapping[str, Any], field: str, folder: Path) -> str | None:
    if section.get(f"{field}-data"):
        return base64.b64decode(section[f"{field}-data"]).decode()
    if section.get(field):
        return Path(folder, section[field]).read_text()
    return None
