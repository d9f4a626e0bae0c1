"""Access by kubeconfig files, read as kubectl reads them: several are one, in which the first that has a name wins."""

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from disttrain_api import yaml_bounds
from disttrain_operator.kube.auth import SERVICE_ACCOUNT, Access, ClientCertificate, Credentials, FileToken, in_cluster
from disttrain_operator.kube.errors import AccessError
from disttrain_operator.kube.exec_plugin import ExecPlugin
from disttrain_operator.kube.proxies import checked, proxy_for

_UNSUPPORTED = ("auth-provider", "username", "as", "as-uid", "as-groups", "as-user-extra")
# Fields of `spec.cluster` in what a plug-in gets.
_CLUSTER_INFO = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url", "disable-compression")
_FOR_PLUGINS = "client.authentication.k8s.io/exec"


class _Entry(NamedTuple):
    """A cluster, user or context, and the folder of its file, which its paths are relative to."""

    content: Mapping[str, Any]
    folder: Path


def find_access(kubeconfig: str | None = None, context: str | None = None) -> Access:
    """A kubeconfig that is named; else the files of KUBECONFIG; else the pod's service account; else ~/.kube/config."""
    names = [kubeconfig] if kubeconfig else os.environ.get("KUBECONFIG", "").split(os.pathsep)
    named = [Path(name) for name in names if name]
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists()
    if not named and context is None and in_pod:
        return in_cluster()
    named = named or [Path.home() / ".kube" / "config"]
    return from_kubeconfig([file for file in named if file.exists()] or named[:1], context)


def from_kubeconfig(files: Sequence[Path], context: str | None = None) -> Access:
    """A context of kubeconfig files; None: the current one, of the first file that has one."""
    contents = {file: _read(file) for file in files}
    currents = (content.get("current-context") for content in contents.values())
    chosen = context or next(filter(None, currents), None)
    entry = _named(contents, "contexts", chosen, "context").content
    cluster = _named(contents, "clusters", entry.get("cluster"), "cluster")
    user = _named(contents, "users", entry["user"], "user") if entry.get("user") else _Entry({}, Path())
    if not cluster.content.get("server"):
        raise AccessError(f"{_joined(files)}: cluster {entry.get('cluster')!r} has no server")
    server = str(cluster.content["server"]).rstrip("/")
    ca = _pem(cluster, "certificate-authority")
    proxy = cluster.content.get("proxy-url")
    return Access(
        server,
        _credentials(user, _cluster_info(cluster.content, ca)),
        ca=ca,
        insecure=bool(cluster.content.get("insecure-skip-tls-verify")),
        namespace=entry.get("namespace") or "default",
        proxy=checked(str(proxy), "proxy-url of the kubeconfig") if proxy else proxy_for(server),
        server_name=cluster.content.get("tls-server-name") or None,
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml_bounds.load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"no service account and no readable kubeconfig at {path}: {error}") from error
    except yaml_bounds.YamlError as error:
        raise AccessError(f"{path} is no kubeconfig: {error}") from error
    if not isinstance(content, dict):
        raise AccessError(f"{path} is no kubeconfig: it holds no mapping")
    return content


def _named(contents: Mapping[Path, Mapping[str, Any]], section: str, name: str | None, key: str) -> _Entry:
    for file, content in contents.items():
        for entry in content.get(section) or []:
            if entry.get("name") == name:
                return _Entry(entry.get(key) or {}, file.parent)
    raise AccessError(f"{_joined(contents)} has no {key} named {name!r}")


def _credentials(user: _Entry, cluster_info: Mapping[str, Any]) -> Credentials:
    for unsupported in _UNSUPPORTED:
        if user.content.get(unsupported):
            advice = "use a token, a client certificate or an exec plugin"
            raise AccessError(f"{unsupported} of a kubeconfig's user is not supported: {advice}")
    certificate, key = _pem(user, "client-certificate"), _pem(user, "client-key")
    if bool(certificate) != bool(key):
        raise AccessError("a kubeconfig's user has one of client-certificate and client-key: give both or neither")
    pair = ClientCertificate(certificate, key) if certificate and key else None
    if user.content.get("token"):
        return Credentials(str(user.content["token"]), pair)
    if user.content.get("tokenFile"):
        return FileToken(user.folder / user.content["tokenFile"], pair)
    if user.content.get("exec"):
        return ExecPlugin(user.content["exec"], user.folder, cluster_info, pair)
    return Credentials(certificate=pair)


def _cluster_info(cluster: Mapping[str, Any], ca: str | None) -> dict[str, Any]:
    info = {name: cluster[name] for name in _CLUSTER_INFO if name in cluster}
    if ca is not None:
        info["certificate-authority-data"] = base64.b64encode(ca.encode()).decode()
    for extension in cluster.get("extensions") or []:
        if extension.get("name") == _FOR_PLUGINS:
            info["config"] = extension.get("extension")
    return info


def _pem(entry: _Entry, field: str) -> str | None:
    if entry.content.get(f"{field}-data"):
        return base64.b64decode(entry.content[f"{field}-data"]).decode()
    if entry.content.get(field):
        path = Path(entry.folder, entry.content[field])
        try:
            return path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise AccessError(f"{field} of the kubeconfig cannot be read at {path}: {error}") from error
    return None


def _joined(files: Sequence[Path] | Mapping[Path, object]) -> str:
    return os.pathsep.join(map(str, files))
