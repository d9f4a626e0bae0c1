"""Credentials that a plug-in of a kubeconfig prints (client.authentication.k8s.io): a token, a certificate, or both."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from disttrain_operator.kube.auth import ClientCertificate, Credentials
from disttrain_operator.kube.errors import AccessError

# A plug-in that talks to nobody may take so long.
_TIMEOUT_SECONDS = 60.0


class ExecPlugin(Credentials):
    """Credential of an exec plug-in, kept until shortly before it expires or until the API server refuses it.

    cluster_info: what a plug-in gets that has provideClusterInfo. fallback: the certificate of a plug-in that
    prints a token alone.
    """

    def __init__(
        self,
        plugin: Mapping[str, Any],
        folder: Path,
        cluster_info: Mapping[str, Any],
        fallback: ClientCertificate | None = None,
    ) -> None:
        super().__init__(certificate=fallback)
        command = str(plugin["command"])
        self._command = [shutil.which(command) or str(folder / command), *(plugin.get("args") or [])]
        mode = plugin.get("interactiveMode")
        self._interactive = mode != "Never" and sys.stdin is not None and sys.stdin.isatty()
        if mode == "Always" and not self._interactive:
            raise AccessError(f"credential plugin {command} has interactiveMode Always, and there is no terminal")
        spec: dict[str, Any] = {"interactive": self._interactive}
        if plugin.get("provideClusterInfo"):
            spec["cluster"] = cluster_info
        info = {"apiVersion": plugin.get("apiVersion"), "kind": "ExecCredential", "spec": spec}
        extra = {entry["name"]: entry["value"] for entry in plugin.get("env") or []}
        self._environment = os.environ | extra | {"KUBERNETES_EXEC_INFO": json.dumps(info)}
        self._expires_at = float("-inf")
        self._lock = threading.Lock()

    def token(self) -> str | None:
        self._refresh_if_due()
        return self._token

    def certificate(self) -> ClientCertificate | None:
        self._refresh_if_due()
        return self._certificate

    def refused(self) -> None:
        self._expires_at = float("-inf")

    def _refresh_if_due(self) -> None:
        with self._lock:
            if time.time() > self._expires_at - 60:
                self._refresh()

    def _refresh(self) -> None:
        # Blocks the loop for as long as the plug-in runs: once per life of a credential, and never inside a cluster.
        # What it says on stderr, such as which page to open, is for whoever looks on.
        try:
            printed = subprocess.run(
                self._command,
                env=self._environment,
                stdin=None if self._interactive else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                check=True,
                timeout=None if self._interactive else _TIMEOUT_SECONDS,
            )
            status = json.loads(printed.stdout)["status"]
            certificate = None
            if "clientCertificateData" in status or "clientKeyData" in status:
                certificate = ClientCertificate(status["clientCertificateData"], status["clientKeyData"])
            elif "token" not in status:
                raise KeyError("token")
            expires = status.get("expirationTimestamp")
            expires_at = datetime.fromisoformat(expires).timestamp() if expires else float("inf")
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
            raise AccessError(f"credential plugin {self._command[0]} gave no credentials: {error!r}") from error
        self._token = status.get("token")
        self._certificate = certificate or self._certificate
        self._expires_at = expires_at
