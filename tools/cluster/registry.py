"""The read-only half of an image registry, on a free loopback port, straight from an image layout's folder.

For the seconds in which a node's containerd pulls from it: pulling, it asks only for the layers that it lacks.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from tools.cluster.oci import MANIFEST, Layout

_PATH = re.compile(r"/v2/disttrain/(?P<name>[a-z]+)/(?P<kind>manifests|blobs)/(?P<reference>[\w:.-]+)")


def find(layout: Layout, path: str) -> tuple[Path, str, str] | None:
    """The file that a request's path means, with its media type and digest."""
    asked = _PATH.fullmatch(path)
    if not asked:
        return None
    digest, kind = asked["reference"], "application/octet-stream"
    if asked["kind"] == "manifests":
        kind = MANIFEST
        if not digest.startswith("sha256:"):
            digest = (layout.manifest_of(asked["name"]) or {}).get("digest", "")
    blob = layout.blob(digest)
    return (blob, kind, digest) if digest and blob.is_file() else None


@contextmanager
def served(layout: Layout) -> Iterator[str]:
    """Yields the address, `127.0.0.1:PORT`, while it answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            found = find(layout, self.path.partition("?")[0])
            if not found:
                # Everything else there is to ask: /v2/ itself, "is this a registry?"
                self.send_response(200 if self.path.rstrip("/") == "/v2" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            file, kind, digest = found
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(file.stat().st_size))
            self.send_header("Docker-Content-Digest", digest)
            self.end_headers()
            if with_body:
                with file.open("rb") as stream:
                    shutil.copyfileobj(stream, self.wfile, 1 << 20)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class' name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
