"""kopf hosts the process, and watches the jobs: signals, start-up, clean-up, and `kopf.on.event`.

kopf lists and watches the jobs through a session of ours, which keeps from it what would end it
(kube/kopf_session.py). Its handler is called for each event of a job, and takes it into the cache, which puts the job
into the queue. There is no other source of jobs.

What kopf could do besides is switched off: it asks for no other kinds, posts no Events, keeps no peers, and patches no
job.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol, cast

import aiohttp
import kopf

from disttrain_api.names import GROUP, PLURAL, VERSION
from disttrain_operator.kube.kopf_session import KopfSession
from disttrain_operator.kube.kopf_watch import KopfWatch

logger = logging.getLogger(__name__)

_DAY = 86_400.0
# How long kopf keeps a task and a queue for a job that nothing happens to.
_IDLE_SECONDS = 0.1


class _NoDiffs(kopf.DiffBaseStorage):
    """The previous state of a job, for handlers of changes: there are none."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is."""


class Engine(Protocol):
    """The hosted operator."""

    @property
    def jobs(self) -> Sequence[KopfWatch]:
        """Return what kopf watches: the jobs of the cluster, or of each of some namespaces."""

    async def prepare(self) -> None:
        """Returns when the engine can work: the API server answers."""

    async def work(self) -> None:
        """Works until cancelled."""

    async def close(self) -> None:
        """Gives back what `prepare` and `work` have taken; a second call does nothing."""


class Host:
    """One life of an engine: its handlers of kopf, and how it ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stop = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._refusal: Exception | None = None

    async def run(self) -> None:
        """Returns after SIGTERM or SIGINT; raises what ended the engine before.

        To be called in the main thread, where signals arrive.
        """
        namespaces = [watch.within for watch in self._engine.jobs if watch.within is not None]
        try:
            await kopf.operator(
                registry=self._registry(),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=namespaces,
                stop_flag=self._stop,
            )
        finally:
            for watch in self._engine.jobs:
                watch.close()
            await self._engine.close()
        if self._refusal is not None:
            raise self._refusal
        if self._work is not None and not self._work.cancelled():
            self._work.result()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(self._begin)
        kopf.on.login(registry=registry)(self._login)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(self._job_changed)
        kopf.on.cleanup(registry=registry)(self._end)
        return registry

    async def _job_changed(self, event: kopf.RawEvent, **_: Any) -> None:
        """The one source of jobs: each list, and each event of a watch."""
        uid = event["object"]["metadata"]["uid"]
        for watch in self._engine.jobs:
            if watch.take(uid):
                break

    async def _begin(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.scanning.disabled = True
        settings.posting.enabled = False
        settings.process.ultimate_exiting_timeout = None
        # The watches know themselves when they are dead, and when to try again.
        settings.watching.inactivity_timeout = _DAY
        settings.watching.reconnect_backoff = 0.0
        settings.queueing.idle_timeout = _IDLE_SECONDS
        settings.persistence.diffbase_storage = _NoDiffs()
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
        session = KopfSession({watch.path: watch for watch in self._engine.jobs})
        return kopf.AiohttpSession(server="https://jobs", aiohttp_session=cast(aiohttp.ClientSession, session))

    async def _end(self, **_: Any) -> None:
        logger.info("stopping")
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})
        await self._engine.close()
        # kopf waits for all tasks that are left, and the one that waits for this is one of them.
        self._stop.set()
