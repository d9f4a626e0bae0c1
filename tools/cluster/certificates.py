"""A certificate authority of our own, by the openssl command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cluster.shell import run


@dataclass(frozen=True)
class Certificate:
    certificate: Path
    key: Path


class Authority:
    """Issues certificates into one folder; what is there already is kept, so that a restart changes no identity."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root = self._ensure("ca", ["-subj", "/CN=disttrain-test-cluster"])

    def issue(
        self, name: str, common_name: str, organization: str = "", alternative_names: Sequence[str] = ()
    ) -> Certificate:
        subject = (f"/O={organization}" if organization else "") + f"/CN={common_name}"
        names = ",".join(alternative_names)
        return self._ensure(
            name,
            ["-subj", subject, "-CA", str(self.root.certificate), "-CAkey", str(self.root.key)]
            + ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", "extendedKeyUsage=serverAuth,clientAuth"]
            + (["-addext", f"subjectAltName={names}"] if names else []),
        )

    def key_pair(self, name: str) -> Certificate:
        """A key and its public half (as a certificate), signed by nobody: for service-account tokens."""
        return self._ensure(name, ["-subj", f"/CN={name}"])

    def _ensure(self, name: str, request: Sequence[str]) -> Certificate:
        issued = Certificate(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        if issued.certificate.is_file():
            return issued
        unfinished = issued.certificate.with_suffix(".unfinished")
        new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(issued.key)]
        command = ["openssl", "req", "-x509", "-days", "365", *new_key, "-out", str(unfinished), *request]
        run(command, doing=f"issuing {name} by openssl (3.0 or newer)")
        unfinished.replace(issued.certificate)
        return issued
