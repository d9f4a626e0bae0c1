"""Which API server, as whom, in which namespace: a kubeconfig, else the pod that this runs in."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disttrain.errors import CommandError
from disttrain_api import yaml_bounds
from disttrain_operator.kube.auth import SERVICE_ACCOUNT, Access, from_kubeconfig, in_cluster
from disttrain_operator.kube.errors import AccessError

_ADVICE = "set KUBECONFIG or --context, or use `disttrain run` without a cluster"


def find_access(context: str | None = None) -> Access:
    """Return address and credentials of an API server. Raises CommandError with what to do."""
    named = [Path(name) for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    if not named and context is None and "KUBERNETES_SERVICE_HOST" in os.environ and SERVICE_ACCOUNT.exists():
        return in_cluster()
    named = named or [Path.home() / ".kube" / "config"]
    files = [file for file in named if file.exists()] or named[:1]
    try:
        if len(files) > 1:
            return _merged(files, context)
        return from_kubeconfig(files[0], context)
    except Exception as error:  # a kubeconfig may hold anything
        what = f"{os.pathsep.join(map(str, files))} cannot be read ({error!r})"
        said = str(error) if isinstance(error, AccessError) else what
        raise CommandError(f"no cluster to talk to: {' '.join(said.split())}; {_ADVICE}") from error


def _merged(files: Sequence[Path], context: str | None) -> Access:
    """Return the access of a context whose cluster and user may stand in different files."""
    # Not above: it takes longer to import than most commands run.
    from kubernetes import client, config

    joined = os.pathsep.join(map(str, files))
    chosen, entry = _context(files, context)
    settings = client.Configuration()
    config.load_kube_config(joined, chosen, settings, persist_config=False)
    return Access(
        server=settings.host.rstrip("/"),
        token=lambda: (
            (settings.get_api_key_with_prefix("BearerToken", "authorization") or "").removeprefix("Bearer ") or None
        ),
        ca=_text(settings.ssl_ca_cert),
        certificate=_text(settings.cert_file),
        key=_text(settings.key_file),
        insecure=not settings.verify_ssl,
        namespace=entry.get("namespace") or "default",
    )


def _context(files: Sequence[Path], named: str | None) -> tuple[str, dict[str, Any]]:
    """Return name and content of a context; None: the current one, of the first file that has one, as for kubectl.

    The library takes the last file's. Raises AccessError where there is none.
    """
    contents = [_read(file) for file in files]
    chosen = named or next((current for one in contents if (current := one.get("current-context"))), None)
    for one in contents:
        for entry in one.get("contexts") or []:
            if entry["name"] == chosen:
                return entry["name"], entry["context"]
    raise AccessError(f"no context named {chosen!r} in {os.pathsep.join(map(str, files))}")


def _read(file: Path) -> Any:
    """Return what is in a kubeconfig, within bounds that the library that reads it later does not know."""
    try:
        return yaml_bounds.load(file.read_text()) or {}
    except yaml_bounds.YamlError as error:
        raise AccessError(f"{file} is no kubeconfig: {error}") from error


def _text(path: str | None) -> str | None:
    return None if path is None else Path(path).read_text()
