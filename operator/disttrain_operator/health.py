"""/healthz: does this process turn? /readyz: does it know the cluster? Both answer with a line per stream. /metrics.

An API server that is away makes nobody unhealthy: starting the operator again would not bring it back. Only a loop that
hangs, an informer that has stopped trying, or one that has failed for minutes though the server answers does. Objects
that cannot be read are counted; they are their owners' trouble. A standby is ready: its caches are warm.

What strangers may do at the port is bounded by connection_limits.py. Each connection is for one request.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from disttrain_operator.connection_limits import AT_A_TIME, ConnectionLimiter, Limits, everywhere
from disttrain_operator.kube.watch import Watch
from disttrain_operator.lag import LoopLag
from disttrain_operator.metrics import Metrics

logger = logging.getLogger(__name__)

# An informer tries something at least this often; its longest wait is a silent stream.
STUCK_SECONDS = 300.0
# An informer that is answered, and yet has neither listed nor watched: starting anew says what is missing.
FAILING_SECONDS = 300.0
# A tick of the loop that is this late: something blocks it for good.
HUNG_SECONDS = 30.0
# An answer that is on its way when the port closes.
_LAST_SECONDS = 1.0


class Health:
    """The answers, and the server that gives them."""

    def __init__(
        self,
        informers: Sequence[Watch],
        lag: LoopLag,
        metrics: Metrics | None = None,
        role: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
        limits: Limits | None = None,
    ) -> None:
        """`role` says in a line whether this replica acts."""
        self._informers, self._lag, self._metrics, self._role, self._clock = informers, lag, metrics, role, clock
        self._limits = limits or Limits()
        self._pages = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics_page}
        self._listener: asyncio.Server | None = None
        self._server: web.Server | None = None
        self.limiter: ConnectionLimiter | None = None
        self.address: tuple[str, int] | None = None

    async def serve(self, address: str, port: int) -> None:
        """Listens until `close`. An empty `address` stands for all of this machine."""
        quiet = logging.getLogger("disttrain_operator.http")
        # Whoever sends garbage would fill the log.
        quiet.disabled = True
        self._server = web.Server(
            self._answer, logger=quiet, access_log=None, keepalive_timeout=0, lingering_time=0, max_line_size=1024,
            max_field_size=4096, max_headers=64,
        )  # fmt: skip
        self.limiter = ConnectionLimiter(self._server, self._limits)
        listen = partial(asyncio.get_running_loop().create_server, self.limiter, backlog=AT_A_TIME)
        self._listener = await (listen(address, port) if address else listen(sock=everywhere(port)))
        self.address = self._listener.sockets[0].getsockname()[:2]

    async def close(self) -> None:
        """Stops listening."""
        if self._listener is not None and self._server is not None:
            self._listener.close()
            await self._server.shutdown(_LAST_SECONDS)

    @property
    def healthy(self) -> bool:
        """The loop turns, and every informer that has begun tried something lately, and has not failed for minutes."""
        if self._clock() - self._lag.ticked_at >= HUNG_SECONDS:
            return False
        return not any(
            self._is_stuck(informer) or self._failing(informer) >= FAILING_SECONDS for informer in self._informers
        )

    def _is_stuck(self, informer: Watch) -> bool:
        return informer.tried_at is not None and self._clock() - informer.tried_at >= STUCK_SECONDS

    def _failing(self, informer: Watch) -> float:
        """For how many seconds the informer has failed though the server answers."""
        return 0.0 if informer.failing_since is None else self._clock() - informer.failing_since

    @property
    def ready(self) -> bool:
        """Every cache holds a complete list."""
        return all(informer.synced for informer in self._informers)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request; its connection then ends."""
        response = self._response(request)
        response.force_close()
        return response

    def _response(self, request: web.BaseRequest) -> web.Response:
        page = self._pages.get(request.path)
        if page is None:
            return web.Response(text=f"no such page; there are {', '.join(self._pages)}\n", status=404)
        if request.method not in ("GET", "HEAD"):
            return web.Response(text="only GET is answered\n", status=405, headers={"Allow": "GET, HEAD"})
        try:
            return page()
        except Exception:
            logger.exception("%s could not be answered", request.path)
            return web.Response(text="the operator's log says why there is no answer\n", status=500)

    def _healthz(self) -> web.Response:
        return web.Response(text=self._report(), status=200 if self.healthy else 503)

    def _readyz(self) -> web.Response:
        return web.Response(text=self._report(), status=200 if self.ready else 503)

    def _metrics_page(self) -> web.Response:
        if self._metrics is None:
            return web.Response(text="there are no metrics\n", status=404)
        return web.Response(body=self._metrics.text(), headers={"Content-Type": self._metrics.content_type})

    def _report(self) -> str:
        lines = [f"{informer.path}: {self._state(informer)}" for informer in self._informers]
        lines.append(f"event loop: at most {self._lag.worst * 1000:.0f} ms late in the last minute")
        return "\n".join([*lines, self._role()]).strip() + "\n"

    def _state(self, informer: Watch) -> str:
        if informer.answered_at is None:
            return "never heard of"
        age = self._clock() - informer.answered_at
        text = f"{informer.objects} objects, last heard of {age:.0f} s ago"
        if informer.unreadable:
            text += f", {informer.unreadable} cannot be read"
        if informer.failing_since is not None:
            text += f", failing for {self._failing(informer):.0f} s"
        return text
