"""The listening socket of the agent. The server itself is loaded at the first connection."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

from disttrain_agent.connection_limits import ConnectionLimiter
from disttrain_agent.environment import PodEnvironment
from disttrain_agent.limits import Admission, Limits
from disttrain_agent.look import Look

_BACKLOG = 64
Protocols = Callable[[Look, str, Admission, Limits], Callable[[], asyncio.Protocol]]


@dataclass
class Listener:
    """A socket that listens, and the server that answers on it once somebody has come."""

    socket: socket.socket
    look: Look
    token: str
    limits: Limits

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loading: asyncio.Future[Protocols] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None
        self._loop.add_reader(self.socket, self._somebody_comes)

    def load(self) -> asyncio.Future[Protocols]:
        """Load the server, so that the first connection does not wait for it."""
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(_load))
        return self._loading

    def close(self) -> None:
        """Stop answering."""
        if self._serving is None:
            self._loop.remove_reader(self.socket)
        else:
            self._serving.cancel()
        if self._server is not None:
            self._server.close()
        self.socket.close()

    def _somebody_comes(self) -> None:
        self._loop.remove_reader(self.socket)
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        protocols = await self.load()
        admission = Admission(self.limits)
        limiter = ConnectionLimiter(protocols(self.look, self.token, admission, self.limits), admission, self.limits)
        self._server = await self._loop.create_server(limiter, sock=self.socket, backlog=_BACKLOG)


def _load() -> Protocols:
    from disttrain_agent.http_api import protocols

    return protocols


def listen(
    pod: PodEnvironment, look: Look, log: Callable[[str], None], limits: Limits | None = None
) -> Listener | None:
    """Listen where the pod says. None, and a sentence, where that cannot be: the training goes on without."""
    token = pod.agent_token
    if pod.agent_port is None or token is None:
        return None
    try:
        opened = open_port(pod.agent_port, loopback=pod.on_loopback)
    except (OSError, OverflowError) as error:
        log(f"cannot listen on port {pod.agent_port}: {error}; nobody can ask how the ranks are")
        return None
    opened.setblocking(False)
    return Listener(opened, look, token, limits or Limits())


def open_port(port: int, *, loopback: bool) -> socket.socket:
    """Return a socket that listens, on the loopback interface alone or on all. Raises OSError or OverflowError."""
    if loopback:
        return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        # The kernel may support IPv6 and have it switched off.
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)
