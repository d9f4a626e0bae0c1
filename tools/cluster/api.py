"""Just enough of an API client for starting a cluster: JSON over HTTPS with a client certificate."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.cluster.certificates import Certificate
from tools.cluster.errors import ClusterError

Json = Any

REQUEST_SECONDS = 60
"""How long a request may take: what the API server itself allows one. A machine that is busy, or stands still for a
moment, has taken more than 10 s for the schema of the jobs, which takes half a second otherwise."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Json:
        return json.loads(self.body)


class ApiClient:
    def __init__(self, url: str, root: Path, client: Certificate) -> None:
        self.url = url
        parts = urllib.parse.urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 443
        self._tls = ssl.create_default_context(cafile=str(root))
        self._tls.load_cert_chain(str(client.certificate), str(client.key))

    def ask(self, method: str, path: str, body: Json = None) -> Answer:
        """Raises OSError if nobody answers."""
        return self.send(method, path, None if body is None else json.dumps(body).encode())

    def send(self, method: str, path: str, payload: bytes | None) -> Answer:
        """A request whose body is JSON already. Raises OSError if nobody answers."""
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=REQUEST_SECONDS, context=self._tls)
        try:
            content = "application/merge-patch+json" if method == "PATCH" else "application/json"
            connection.request(method, path, payload, {"Content-Type": content})
            response = connection.getresponse()
            return Answer(response.status, response.read())
        except http.client.HTTPException as broken:
            raise ConnectionError(str(broken)) from broken
        finally:
            connection.close()

    def get(self, path: str) -> Json:
        answer = self.ask("GET", path)
        if answer.status != 200:
            raise ClusterError(f"GET {path}: {answer.status} {answer.body[:200].decode(errors='replace')}")
        return answer.json()

    def ensure(self, collection: str, thing: Json) -> None:
        """Creates an object, or leaves the one of that name as it is."""
        name = thing["metadata"]["name"]
        # Asked first: a Service with the address that its own namesake has is refused as invalid, not as existing.
        if self.ask("GET", f"{collection}/{name}").status == 200:
            return
        answer = self.ask("POST", collection, thing)
        if answer.status not in (200, 201, 409):
            raise ClusterError(f"creating {name}: {answer.status} {answer.body[:300].decode(errors='replace')}")

    def ready(self) -> bool:
        try:
            return self.ask("GET", "/readyz").status == 200
        except OSError:
            return False


def write_kubeconfig(path: Path, url: str, root: Path, client: Certificate) -> None:
    """With the certificates inside, so that the file works wherever it is copied. (JSON is YAML.)"""

    def embed(file: Path) -> str:
        return base64.b64encode(file.read_bytes()).decode()

    user = {"client-certificate-data": embed(client.certificate), "client-key-data": embed(client.key)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "disttrain",
        "clusters": [{"name": "disttrain", "cluster": {"server": url, "certificate-authority-data": embed(root)}}],
        "users": [{"name": "disttrain", "user": user}],
        "contexts": [{"name": "disttrain", "context": {"cluster": "disttrain", "user": "disttrain"}}],
    }
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(json.dumps(config, indent=1))
    fresh.replace(path)


def wait_for(condition: Callable[[], bool], seconds: float, otherwise: Callable[[], str], pause: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(otherwise())
        time.sleep(pause)
