"""/healthz: does this process turn? /readyz: does it know the cluster? Both answer with a line per stream. /metrics.

An API server that is away makes nobody unhealthy: starting the operator again would not bring it back. Only a loop that
hangs, an informer that has stopped trying, or one that has failed for minutes though the server answers does. Objects
that cannot be read are counted; they are their owners' trouble. A standby is ready: its caches are warm.
"""

import time
from collections.abc import Callable, Sequence

from aiohttp import web

from disttrain_operator.kube.informer import Informer
from disttrain_operator.lag import LoopLag
from disttrain_operator.metrics import Metrics

# An informer tries something at least this often; its longest wait is a silent stream.
STUCK_SECONDS = 300.0
# An informer that is answered, and yet has neither listed nor watched: starting anew says what is missing.
FAILING_SECONDS = 300.0
# A tick of the loop that is this late: something blocks it for good.
HUNG_SECONDS = 30.0


class Health:
    """The answers, and the server that gives them."""

    def __init__(
        self,
        informers: Sequence[Informer],
        lag: LoopLag,
        metrics: Metrics | None = None,
        role: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`role` says in a line whether this replica acts."""
        self._informers, self._lag, self._metrics, self._role, self._clock = informers, lag, metrics, role, clock
        self._runner: web.AppRunner | None = None
        self.address: tuple[str, int] | None = None

    async def serve(self, address: str, port: int) -> None:
        """Listens until `close`."""
        application = web.Application()
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics_page)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, address, port)
        await site.start()
        self.address = self._runner.addresses[0][:2]

    async def close(self) -> None:
        """Stops listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def healthy(self) -> bool:
        """The loop turns, and every informer that has begun tried something lately, and has not failed for minutes."""
        if self._clock() - self._lag.ticked_at >= HUNG_SECONDS:
            return False
        return not any(
            self._is_stuck(informer) or self._failing(informer) >= FAILING_SECONDS for informer in self._informers
        )

    def _is_stuck(self, informer: Informer) -> bool:
        return informer.tried_at is not None and self._clock() - informer.tried_at >= STUCK_SECONDS

    def _failing(self, informer: Informer) -> float:
        """For how many seconds the informer has failed though the server answers."""
        return 0.0 if informer.failing_since is None else self._clock() - informer.failing_since

    @property
    def ready(self) -> bool:
        """Every cache holds a complete list."""
        return all(informer.synced for informer in self._informers)

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text=self._report(), status=200 if self.healthy else 503)

    async def _readyz(self, _: web.Request) -> web.Response:
        return web.Response(text=self._report(), status=200 if self.ready else 503)

    async def _metrics_page(self, _: web.Request) -> web.Response:
        if self._metrics is None:
            raise web.HTTPNotFound
        return web.Response(body=self._metrics.text(), headers={"Content-Type": self._metrics.content_type})

    def _report(self) -> str:
        lines = [f"{informer.path}: {self._state(informer)}" for informer in self._informers]
        lines.append(f"event loop: at most {self._lag.worst * 1000:.0f} ms late in the last minute")
        return "\n".join([*lines, self._role()]).strip() + "\n"

    def _state(self, informer: Informer) -> str:
        if informer.heard_at is None:
            return "never heard of"
        age = self._clock() - informer.heard_at
        text = f"{informer.objects} objects, last heard of {age:.0f} s ago"
        if informer.unreadable:
            text += f", {informer.unreadable} cannot be read"
        if informer.failing_since is not None:
            text += f", failing for {self._failing(informer):.0f} s"
        return text
