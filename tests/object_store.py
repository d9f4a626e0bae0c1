"""An object store for tests: moto's S3 server, on the loopback."""

from collections.abc import Iterator
from contextlib import contextmanager

from moto.server import ThreadedMotoServer

KEYS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def object_store(port: int = 0) -> Iterator[dict[str, str]]:
    """The server runs inside; gives what a template's environment says about it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        host, bound = server.get_host_and_port()
        yield {**KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{bound}"}
    finally:
        server.stop()
