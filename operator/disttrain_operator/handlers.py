"""kopf: the low-latency watch of DistTrainingJobs. No decision, no store, no request.

Only `on.event`: it adds no finalizer and no annotation, costs no request, and a standby replica can run it. kopf runs
in a thread and a loop of its own, for two reasons that are kopf's design: some answers of the API server end
`kopf.operator()` (an ERROR event other than 410, a 410 as answer), and when it ends it cancels every task of its loop
that it did not find there when it began. So it is started again after a moment, and nothing of ours notices.

kopf's parser recurses: an object that nests a thousand levels would end it, for ever. Its session (kube/shallow.py)
gives it no list, and of the watch what nests like ordinary objects.

kopf tells of no deletion that happened while it listed again. Therefore the operator has an informer for the jobs, too,
as for pods; both fill one cache, in any order. kopf may be down, late or wrong: nothing is lost but milliseconds.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from disttrain_api.names import GROUP, PLURAL, VERSION
from disttrain_operator.kube.auth import Access
from disttrain_operator.kube.shallow import session

logger = logging.getLogger(__name__)

OnEvent = Callable[[str | None, dict[str, Any]], None]

FIRST_DELAY, MAX_DELAY = 0.1, 30.0
# Who lived so long is well.
WELL_SECONDS = 60.0
# Long enough for the token file of a pod to be rotated behind kopf's back.
LOGIN_SECONDS = 600


class ShortBackoffs:
    """For ever, and iterable again for each request: an outage of any length is survived."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.05, 0.1, 0.2, 0.4)
        while True:
            yield 0.5


class NoDiffs(kopf.DiffBaseStorage):
    """Nobody asks kopf what has changed: without this it copies every object twice to find out."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is kept."""


def registry_of(access: Access, on_event: OnEvent) -> kopf.OperatorRegistry:
    """Return what kopf needs: how to log in, its settings, and the handlers of events."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.scanning.disabled = True
        settings.posting.enabled = False
        settings.persistence.diffbase_storage = NoDiffs()
        settings.peering.standalone = True
        settings.process.ultimate_exiting_timeout = None
        settings.watching.server_timeout = 270
        settings.watching.connect_timeout = 5
        settings.watching.chunk_size = 1  # see kube/shallow.py
        settings.networking.error_backoffs = ShortBackoffs()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return kopf.AiohttpSession(
            server=access.server,
            aiohttp_session=session(access),
            expiration=datetime.now(UTC) + timedelta(seconds=LOGIN_SECONDS),
        )

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def seen(event: Any, **_: Any) -> None:
        on_event(event["type"], event["object"])

    return registry


class KopfThread:
    """Runs kopf until `stop`, starting it again whenever it ends. `on_event` is called in the loop that made this.

    `namespaces`: those to watch; none: all.
    """

    def __init__(self, access: Access, namespaces: Sequence[str], on_event: OnEvent) -> None:
        self._access, self._namespaces = access, list(namespaces)
        self._on_event, self._our_loop = on_event, asyncio.get_running_loop()
        self._stopped = threading.Event()
        self._flag: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.restarts = 0
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends kopf; it writes nothing, so nobody needs to wait for it."""
        self._stopped.set()
        if self._flag is not None:
            loop, flag = self._flag
            loop.call_soon_threadsafe(flag.set)

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, but no longer."""
        self._thread.join(seconds)

    def _run(self) -> None:
        delay = FIRST_DELAY
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                asyncio.run(self._operate())
            except Exception as error:
                logger.warning("kopf ended, starting it again: %s", error)
            self._flag = None
            self.restarts += 1
            if time.monotonic() - began > WELL_SECONDS:
                delay = FIRST_DELAY
            self._stopped.wait(delay)
            delay = min(delay * 2, MAX_DELAY)

    async def _operate(self) -> None:
        flag = asyncio.Event()
        self._flag = (asyncio.get_running_loop(), flag)
        if self._stopped.is_set():
            return
        await kopf.operator(
            registry=registry_of(self._access, self._pass_on),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=flag,
        )

    def _pass_on(self, kind: str | None, raw: dict[str, Any]) -> None:
        if not self._our_loop.is_closed():
            self._our_loop.call_soon_threadsafe(self._on_event, kind, raw)
