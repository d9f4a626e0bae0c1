"""Which API server, as whom, in which namespace: a kubeconfig, else this pod's account; or what a program says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from disttrain.errors import CommandError
from disttrain_operator.kube import kubeconfig
from disttrain_operator.kube.auth import Access, ClientCertificate, Credentials
from disttrain_operator.kube.errors import AccessError

if TYPE_CHECKING:
    # Not imported: who hands a Configuration over has the package.
    from kubernetes.client import Configuration

_ADVICE = "set KUBECONFIG or --context, or use `disttrain run` without a cluster"


def find_access(context: str | None = None) -> Access:
    """Return address and credentials of an API server. Raises CommandError with what to do."""
    try:
        return kubeconfig.find_access(context=context)
    except Exception as error:  # a kubeconfig may hold anything
        reason = str(error) if isinstance(error, AccessError) else f"the kubeconfig cannot be read ({error!r})"
        raise CommandError(f"no cluster to talk to: {' '.join(reason.split())}; {_ADVICE}") from error


def access_of(configuration: Configuration, namespace: str = "default") -> Access:
    """Return the access that a program has set up with the package `kubernetes`, whose tokens it may renew.

    Raises CommandError where a file that it names cannot be read.
    """
    try:
        certificate, key = _text(configuration.cert_file), _text(configuration.key_file)
        pair = ClientCertificate(certificate, key) if certificate and key else None
        return Access(
            configuration.host.rstrip("/"),
            _Configured(configuration, pair),
            ca=_text(configuration.ssl_ca_cert),
            insecure=not configuration.verify_ssl,
            namespace=namespace,
            proxy=configuration.proxy or None,
            server_name=getattr(configuration, "tls_server_name", None),
        )
    except OSError as error:
        raise CommandError(f"configuration: {error.filename} cannot be read: {error.strerror}") from error


class _Configured(Credentials):
    """A token as the configuration has it at the time: its hook may renew it."""

    def __init__(self, configuration: Configuration, certificate: ClientCertificate | None) -> None:
        super().__init__(certificate=certificate)
        self._configuration = configuration

    def token(self) -> str | None:
        """Return what the configuration's header says after `Bearer`; None: it has none."""
        for name in ("authorization", "BearerToken"):
            if value := self._configuration.get_api_key_with_prefix(name):
                return str(value).removeprefix("Bearer ")
        return None


def _text(path: str | None) -> str | None:
    return None if path is None else Path(path).read_text()
