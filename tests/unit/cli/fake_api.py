"""A small API server in this process: objects by path, merge patches, selectors, watches, and logs that grow."""

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import yaml

from disttrain_api.names import CONTAINER, TOKEN_HEADER
from tests.builders import merge

Raw = dict[str, Any]
JOBS = "/apis/disttrain.io/v1alpha1/namespaces/{}/disttrainingjobs"


TIME = "2026-01-01T12:00:00Z"


def a_condition(type_: str, status: str = "True", reason: str = "Because", message: str = "it is so") -> Raw:
    rest = {"reason": reason, "message": message, "lastTransitionTime": TIME, "observedGeneration": 1}
    return {"type": type_, "status": status, **rest}


class FakeApi:
    """An API server that believes everything. `answers` replaces what it says to a path."""

    def __init__(self) -> None:
        self.objects: dict[str, Raw] = {}
        self.logs: dict[str, list[str]] = {}
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[str] = []
        self.credentials: list[str | None] = []
        """The header Authorization of each read."""
        self.agent_tokens: list[str] = []
        """What was sent through to pods as the token of their agents."""
        self.validated: list[str] = []
        """The query of each write that made or changed something."""
        self.changed = threading.Condition()
        self._version = 0
        fake = self

        class Handler(_Handler):
            api = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def kubeconfig(self, path: Path, namespace: str = "default") -> None:
        config = {
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "namespace": namespace}}],
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
        }
        path.write_text(yaml.safe_dump(config))

    def put(self, collection: str, raw: Raw) -> None:
        """Store an object, or lay it over the one of that name."""
        with self.changed:
            self._version += 1
            path = f"{collection}/{raw['metadata']['name']}"
            metadata = {"resourceVersion": str(self._version)}
            self.objects[path] = merge(merge(self.objects.get(path, {}), raw), {"metadata": metadata})
            self.changed.notify_all()

    def put_job(self, raw: Raw) -> None:
        self.put(JOBS.format(raw["metadata"]["namespace"]), raw)

    def put_pod(self, raw: Raw, *lines: str) -> None:
        """A pod, and lines of its log."""
        self.put(f"/api/v1/namespaces/{raw['metadata']['namespace']}/pods", raw)
        with self.changed:
            self.logs.setdefault(raw["metadata"]["name"], []).extend(lines)
            self.changed.notify_all()

    def remove(self, path: str) -> None:
        with self.changed:
            self.objects.pop(path, None)
            self.changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    api: FakeApi

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        with self.api.changed:
            self.api.asked.append(f"GET {self.path}")
            self.api.credentials.append(self.headers.get("Authorization"))
            self.api.agent_tokens += self.headers.get_all(TOKEN_HEADER, [])
            self.api.changed.notify_all()
        if url.path in self.api.answers:
            self._answer(*self.api.answers[url.path])
        elif url.path.endswith("/log"):
            self._log(url.path.split("/")[-2], query)
        elif url.path in self.api.objects:
            self._answer(200, self.api.objects[url.path])
        elif "watch" in query:
            self._watch(url.path, query)
        elif url.path.rpartition("/")[2].islower() and self._is_collection(url.path):
            found = [raw for path, raw in list(self.api.objects.items()) if _below(path, url.path)]
            self._answer(200, {"items": [raw for raw in found if _selected(raw, query)]})
        else:
            name = url.path.rpartition("/")[2]
            self._answer(404, {"message": f'disttrainingjobs.disttrain.io "{name}" not found'})

    def do_POST(self) -> None:
        body = self._written("POST")
        if self.path in self.api.answers:
            self._answer(*self.api.answers[self.path])
            return
        if "generateName" in body["metadata"]:
            body["metadata"].setdefault("name", f"{body['metadata']['generateName']}2b4d6")
        self.api.put(self.path, body)
        self._answer(201, self.api.objects[f"{self.path}/{body['metadata']['name']}"])

    def do_PATCH(self) -> None:
        body = self._written("PATCH")
        if self.path not in self.api.objects:
            self._answer(404, {"message": "not found"})
            return
        collection, _, name = self.path.rpartition("/")
        self.api.put(collection, {**body, "metadata": body.get("metadata", {}) | {"name": name}})
        self._answer(200, self.api.objects[self.path])

    def _written(self, method: str) -> Raw:
        """The body of a write. From here on the path is without its query."""
        body, url = self._body(), urlsplit(self.path)
        self.path = url.path
        self.api.asked.append(f"{method} {self.path} {json.dumps(body)}")
        self.api.validated.append(url.query)
        return body

    def do_DELETE(self) -> None:
        self._body()
        self.api.asked.append(f"DELETE {self.path}")
        self.api.remove(self.path)
        self._answer(200, {})

    def _is_collection(self, path: str) -> bool:
        kinds = ("pods", "events", "disttrainingjobs", "nodes", "deployments", "leases", "configmaps")
        return path.rpartition("/")[2] in kinds

    def _watch(self, path: str, query: Mapping[str, str]) -> None:
        """Changes after the version that is named; the watch ends after the first."""
        name = query["fieldSelector"].removeprefix("metadata.name=")
        with self.api.changed:
            self.api.changed.wait_for(
                lambda: self._version(f"{path}/{name}") != query["resourceVersion"],
                timeout=float(query["timeoutSeconds"]),
            )
            now = self.api.objects.get(f"{path}/{name}")
        event = (
            {"type": "MODIFIED", "object": now} if now else {"type": "DELETED", "object": {"metadata": {"uid": "x"}}}
        )
        self._answer(200, event)

    def _version(self, path: str) -> str | None:
        found = self.api.objects.get(path)
        return found and found["metadata"]["resourceVersion"]

    def _log(self, pod: str, query: Mapping[str, str]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent = 0
        while True:
            with self.api.changed:
                lines = self.api.logs.get(pod, [])
                if "follow" in query:
                    self._more(pod, sent)
                new, over = lines[sent:], _ended(self.api, pod) or "follow" not in query
            if sent == 0 and "tailLines" in query:
                new = new[-int(query["tailLines"]) :]
            if new:
                part = "".join(f"{line}\n" for line in new).encode()
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            sent = len(lines)
            if over:
                self.wfile.write(b"0\r\n\r\n")
                return

    def _more(self, pod: str, sent: int) -> None:
        self.api.changed.wait_for(lambda: len(self.api.logs.get(pod, [])) > sent or _ended(self.api, pod))

    def _body(self) -> Raw:
        length = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(length)) if length else {}

    def _answer(self, status: int, body: Any) -> None:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def _ended(api: FakeApi, pod: str) -> bool:
    found = next((raw for path, raw in api.objects.items() if path.endswith(f"/pods/{pod}")), None)
    if found is None:
        return True
    for container in found.get("status", {}).get("containerStatuses", []):
        if container["name"] == CONTAINER and "terminated" in container["state"]:
            return True
    return False


def _below(path: str, collection: str) -> bool:
    head, _, plural = collection.rpartition("/")
    parts = path.split("/")
    inside = path.startswith(f"{collection}/")
    of_all = "/namespaces/" not in collection and path.startswith(f"{head}/namespaces/") and parts[-2] == plural
    return inside or of_all


def _selected(raw: Raw, query: Mapping[str, str]) -> bool:
    for label, value in (pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair):
        if raw["metadata"].get("labels", {}).get(label) != value:
            return False
    field = query.get("fieldSelector", "")
    if field.startswith("involvedObject.uid="):
        return bool(raw["involvedObject"]["uid"] == field.partition("=")[2])
    return True
