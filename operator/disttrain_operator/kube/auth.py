"""Address and credentials of the API server, from the pod's service account or a kubeconfig.

Credentials are asked for with every request: tokens are read again from their file as it rotates, and what a plug-in
gave is renewed before it expires.
"""

import os
import ssl
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from disttrain_operator.kube.proxies import proxy_for

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# A projected token is replaced at 80 % of its life of an hour or more.
_REREAD_SECONDS = 30.0


class ClientCertificate(NamedTuple):
    """Certificate and key, as PEM."""

    certificate: str
    key: str


class Credentials:
    """Credentials: a token, a client certificate, both, or none."""

    def __init__(self, token: str | None = None, certificate: ClientCertificate | None = None) -> None:
        self._token, self._certificate = token, certificate

    def token(self) -> str | None:
        """The token of the next request."""
        return self._token

    def certificate(self) -> ClientCertificate | None:
        """The certificate of the next connection. With another one than before, connections are made anew."""
        return self._certificate

    def refused(self) -> None:
        """Called when the API server has not accepted them: those that can be had anew are, next time."""


class FileToken(Credentials):
    """A token in a file that somebody else rotates."""

    def __init__(self, path: Path, certificate: ClientCertificate | None = None) -> None:
        super().__init__(certificate=certificate)
        self._path, self._read_at = path, float("-inf")

    def token(self) -> str | None:
        now = time.monotonic()
        if now - self._read_at > _REREAD_SECONDS:
            self._token, self._read_at = self._path.read_text().strip(), now
        return self._token

    def refused(self) -> None:
        self._read_at = float("-inf")


@dataclass(frozen=True)
class Access:
    """An API server and credentials for it."""

    server: str
    credentials: Credentials = field(default_factory=Credentials)
    ca: str | None = None
    """PEM. None: the authorities that the system trusts, or those of SSL_CERT_FILE and SSL_CERT_DIR."""
    insecure: bool = False
    namespace: str = "default"
    proxy: str | None = None
    """The address of the proxy that leads to the server."""
    server_name: str | None = None
    """The name that the server's certificate is checked for, where it is not the one in its address."""
    in_pod: bool = False
    """Whether it is that of a pod's service account, so that this process is inside of the cluster."""

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context; None for a plain http:// server."""
        if not self.server.startswith("https:"):
            return None
        context = ssl.create_default_context(cadata=self.ca)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if pair := self.credentials.certificate():
            # The ssl module reads client certificates from files only.
            with tempfile.TemporaryDirectory() as folder:
                certificate, key = Path(folder, "certificate.pem"), Path(folder, "key.pem")
                certificate.write_text(pair.certificate)
                key.touch(mode=0o600)
                key.write_text(pair.key)
                context.load_cert_chain(certificate, key)
        return context


def in_cluster(folder: Path = SERVICE_ACCOUNT) -> Access:
    """The service account of the pod that this process runs in."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    namespace = folder / "namespace"
    server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    return Access(
        server,
        FileToken(folder / "token"),
        ca=(folder / "ca.crt").read_text(),
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
        proxy=proxy_for(server),
        in_pod=True,
    )
