"""kopf is the host of the process: signals, start-up, login, clean-up. It watches nothing.

Jobs are read by an informer, as pods are, for two reasons. kopf's watch ends, and `kopf.operator()` with it, at an
object that its parser cannot read and at an ERROR event other than 410. And when kopf lists again after a gap, it does
not report the objects that were deleted in the gap.

kopf itself asks the API server once which kinds it has. The engine does not wait for the answer.
"""

import asyncio
import itertools
import logging
from collections.abc import Iterator
from typing import Any, Protocol

import aiohttp
import kopf

from disttrain_operator.kube.auth import Access

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What is hosted."""

    async def prepare(self) -> None:
        """Returns when the engine can work: the API server answers."""

    async def work(self) -> None:
        """Works until cancelled."""

    async def close(self) -> None:
        """Gives back what `prepare` and `work` have taken; a second call does nothing."""


class EndlessBackoffs:
    """Pauses between tries, in seconds, without an end: kopf survives an outage or a refusal of any length."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.1, 0.5, 1.0, 5.0)
        while True:
            yield 60.0


class Host:
    """One life of an engine: its handlers of kopf, and how it ended."""

    def __init__(self, engine: Engine, access: Access) -> None:
        self._engine, self._access = engine, access
        self._stop = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._refusal: Exception | None = None
        self._login_pauses = itertools.chain([0.0], EndlessBackoffs())

    async def run(self) -> None:
        """Returns after SIGTERM or SIGINT; raises what ended the engine before.

        To be called in the main thread, where signals arrive.
        """
        try:
            # Nothing is watched, so the namespaces of the engine are none of kopf's business.
            await kopf.operator(registry=self._registry(), standalone=True, clusterwide=True, stop_flag=self._stop)
        finally:
            await self._engine.close()
        if self._refusal is not None:
            raise self._refusal
        if self._work is not None and not self._work.cancelled():
            self._work.result()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(self._begin)
        kopf.on.login(registry=registry)(self._login)
        kopf.on.cleanup(registry=registry)(self._end)
        return registry

    async def _begin(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.scanning.disabled = True
        settings.posting.enabled = False
        settings.process.ultimate_exiting_timeout = None
        settings.networking.error_backoffs = EndlessBackoffs()
        try:
            await self._prepare()
        except asyncio.CancelledError:
            await self._end()  # which kopf does not call then
            raise
        self._work = asyncio.create_task(self._engine.work(), name="engine")
        self._work.add_done_callback(lambda _: self._stop.set())

    async def _prepare(self) -> None:
        try:
            await self._engine.prepare()
        except Exception as error:
            self._refusal = error
            # kopf ends in order where it is stopped, and with warnings where a handler fails.
            self._stop.set()
            await asyncio.Event().wait()

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        """Return a new session; kopf ends where it is given the one that was refused. The first comes at once."""
        await asyncio.sleep(next(self._login_pauses))
        # A session, since kopf reads certificates more narrowly than the ssl module.
        tls, token = self._access.ssl_context(), self._access.token()
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls if tls is not None else False),
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )
        return kopf.AiohttpSession(server=self._access.server, aiohttp_session=session)

    async def _end(self, **_: Any) -> None:
        logger.info("stopping")
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})
        await self._engine.close()
        # kopf waits for all tasks that are left, and the one that waits for this is one of them.
        self._stop.set()
