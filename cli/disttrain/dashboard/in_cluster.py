"""`python -m disttrain.dashboard.in_cluster`: serves the pages in a cluster, with the rights of each viewer's token.

It runs in a pod of its own, without an account: the address of the API server and its certificate are all that it has.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from aiohttp import web

from disttrain.client import Client
from disttrain.cluster.api import Api, Bounds
from disttrain.dashboard.cluster import ClusterJobs, Figures, in_words
from disttrain_dashboard.app import application_of_viewers
from disttrain_dashboard.viewers import Open, Viewers
from disttrain_operator.connection_limits import AT_A_TIME, ConnectionLimiter, Limits, everywhere
from disttrain_operator.kube.auth import Access, Credentials
from disttrain_operator.kube.errors import AccessError
from disttrain_operator.kube.proxies import proxy_for

AT_ONCE = 8
"""Answers of the API server that are waited for at the same time."""
BOUNDS = Bounds(page=100, answer=16 * 2**20, list=128 * 2**20)
CONNECTIONS = Limits(connections=256, seconds=150.0, bytes=48 * 1024)
"""Each is for one request, whose answer may wait for an API server that is slow."""
MAX_FIELD = 16 * 1024
"""Bytes of a header: tokens of people with many groups are long."""
_MAX_LINE = 8190
_NAME = "disttrain.dashboard.in_cluster"
_LAST_SECONDS = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM."""
    settings = _settings(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        access = Access(settings.server, ca=settings.ca_file.read_text(), proxy=proxy_for(settings.server))
        access.ssl_context()
    except (OSError, ValueError, AccessError) as error:
        # A certificate that is none is an ssl.SSLError, which is an OSError.
        sys.stderr.write(f"{_NAME}: {settings.ca_file} or the address of the API server: {error}\n")
        return 1
    asyncio.run(_serve(access, settings))
    return 0


def _settings(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(_NAME, description=__doc__, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8080, help="0: any that is free")
    parser.add_argument("--address", default="", help="to listen at; absent: all of this machine")
    parser.add_argument("--server", default=_server(), help="the API server; absent: that of the pod's cluster")
    parser.add_argument("--ca-file", type=Path, required=True, help="PEM with the authority of its certificate")
    parser.add_argument("--namespace", default="", help="listed where a viewer names none, commas between; absent: all")
    settings = parser.parse_args(arguments)
    if not settings.server:
        parser.error("this is no pod of a cluster: name the API server with --server")
    return settings


def _server() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""


def opener(access: Access) -> Open:
    """Return what makes the source of a token: its requests carry that token and nothing else."""
    figures = Figures()

    def open_(token: str, namespaces: tuple[str, ...]) -> ClusterJobs:
        own = Access(access.server, Credentials(token), ca=access.ca, proxy=access.proxy)
        client = Client.of(Api(own, BOUNDS))
        return ClusterJobs(client, namespaces, title=f"Jobs of {in_words(namespaces)}", figures=figures)

    return open_


async def _serve(access: Access, settings: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(AT_ONCE, "api-server"))
    # It would log requests that cannot be read, and with them what may be a token.
    quiet = logging.getLogger("disttrain.dashboard.http")
    quiet.disabled = True
    viewers = Viewers(opener(access), [name for name in settings.namespace.split(",") if name])
    runner = web.AppRunner(
        application_of_viewers(viewers, AT_ONCE), access_log=None, logger=quiet, keepalive_timeout=0, lingering_time=0,
        max_line_size=_MAX_LINE, max_field_size=MAX_FIELD, shutdown_timeout=_LAST_SECONDS,
    )  # fmt: skip
    await runner.setup()
    assert runner.server is not None
    listen = partial(loop.create_server, ConnectionLimiter(runner.server, CONNECTIONS), backlog=AT_A_TIME)
    address, port = settings.address, settings.port
    listener = await (listen(address, port) if address else listen(sock=everywhere(port)))
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    logging.info("serving at port %s, with the API server %s", listener.sockets[0].getsockname()[1], access.server)
    await ended.wait()
    listener.close()
    await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
