"""A cache that follows a collection, by an informer or by kopf: for what must hold of both."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from disttrain_operator.host import Host
from disttrain_operator.kube.cache import Cache
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.informer import Informer
from disttrain_operator.kube.kopf_watch import KopfWatch
from disttrain_operator.kube.watch import Watch
from disttrain_operator.snapshot import job_collection
from tests.unit.operator.conftest import eventually

INFORMER, KOPF = "informer", "kopf"
BOTH = (INFORMER, KOPF)
EVERYWHERE = job_collection(None)
TEAM = job_collection("team")


class Watching:
    """An engine that has kopf watch, and does nothing else until it is ended."""

    def __init__(self, client: Client, collections: Sequence[tuple[str, str | None]], options: dict[str, Any]) -> None:
        self.jobs = [KopfWatch(client, path, within=within, **options) for path, within in collections]
        self.loop, self.ended = asyncio.get_running_loop(), asyncio.Event()

    async def prepare(self) -> None:
        pass

    async def work(self) -> None:
        await self.ended.wait()

    async def close(self) -> None:
        pass


_LOOPS = WeakKeyDictionary[Watch, asyncio.AbstractEventLoop]()


def loop_of(watch: Watch) -> asyncio.AbstractEventLoop:
    """The loop in which kopf runs."""
    return _LOOPS[watch]


@asynccontextmanager
async def following(
    by: str, client: Client, cache: Cache, *namespaces: str | None, **options: Any
) -> AsyncIterator[list[Watch]]:
    """Watches of the jobs of these namespaces (none given: of the cluster) that fill the cache."""
    collections = [(job_collection(namespace), namespace) for namespace in namespaces or (None,)]
    if by == INFORMER:
        informers = [Informer(client, path, cache, within=within, **options) for path, within in collections]
        tasks = [asyncio.create_task(informer.run()) for informer in informers]
        yield [*informers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return
    engines = list[Watching]()

    async def host() -> None:
        own = Client(client.access, retry_delays=(0.0, 0.01, 0.01, 0.01))
        try:
            engines.append(Watching(own, collections, {"cache": cache} | options))
            await Host(engines[0]).run()
        finally:
            await own.close()

    # In a loop of its own: kopf waits for all tasks of its loop, and ends those that do not end.
    hosting = asyncio.create_task(asyncio.to_thread(asyncio.run, host()))
    await eventually(lambda: engines or hosting.done())
    _LOOPS.update(dict.fromkeys(engines[0].jobs, engines[0].loop))
    yield [*engines[0].jobs]
    engines[0].loop.call_soon_threadsafe(engines[0].ended.set)
    await hosting
