"""The Python client for programs that use asyncio: the same calls, awaited.

>>> from disttrain import AsyncClient
>>> client = AsyncClient(namespace="team-a")  # doctest: +SKIP
>>> job = await client.submit("job.yaml")  # doctest: +SKIP
>>> async for line in client.logs(job.name, follow=True):  # doctest: +SKIP
...     handle(line)
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from disttrain.client import Client
from disttrain.cluster.api import Raw
from disttrain.cluster.remote import RemoteJob
from disttrain_api.history import HistoryEntry
from disttrain_api.spec import DistTrainingJob

if TYPE_CHECKING:
    from kubernetes.client import Configuration

    from disttrain.logs.figures import Row
    from disttrain.stacks.of_cluster import Stacks

Item = TypeVar("Item")
_Jobs: TypeAlias = list[RemoteJob]
_Entries: TypeAlias = list[HistoryEntry]
_Rows: TypeAlias = "list[Row]"


class AsyncClient:
    """Jobs of one namespace. Each request is made in a thread; none holds the event loop up. Errors as of `Client`."""

    def __init__(
        self, *, namespace: str | None = None, context: str | None = None, configuration: "Configuration | None" = None
    ) -> None:
        self._client = Client(namespace=namespace, context=context, configuration=configuration)
        self.namespace = self._client.namespace

    async def submit(self, job: "str | Path | Raw | DistTrainingJob") -> RemoteJob:
        """Create a job from a file, a dict or a model."""
        return await asyncio.to_thread(self._client.submit, job)

    async def get(self, name: str, *, namespace: str | None = None) -> RemoteJob:
        """Return the job as it is now."""
        return await asyncio.to_thread(self._client.get, name, namespace=namespace)

    async def list(self, *, all_namespaces: bool = False, selector: str | None = None) -> _Jobs:
        """Return the jobs of the namespace, or of all."""
        return await asyncio.to_thread(self._client.list, all_namespaces=all_namespaces, selector=selector)

    async def history(self, *, all_namespaces: bool = False) -> _Entries:
        """Return what finished jobs of the namespace, or of all, came to, the last finished first."""
        return await asyncio.to_thread(self._client.history, all_namespaces=all_namespaces)

    async def suspend(self, name: str, *, namespace: str | None = None) -> RemoteJob:
        """Ask the job's pods to write a checkpoint and stop."""
        return await asyncio.to_thread(self._client.suspend, name, namespace=namespace)

    async def resume(self, name: str, *, namespace: str | None = None) -> RemoteJob:
        """Resume a suspended job from its last checkpoint."""
        return await asyncio.to_thread(self._client.resume, name, namespace=namespace)

    async def checkpoint(self, name: str, *, namespace: str | None = None) -> RemoteJob:
        """Ask the job's ranks for a checkpoint. It runs on meanwhile."""
        return await asyncio.to_thread(self._client.checkpoint, name, namespace=namespace)

    async def delete(self, name: str, *, namespace: str | None = None) -> None:
        """Delete the job; its pods go with it."""
        await asyncio.to_thread(self._client.delete, name, namespace=namespace)

    async def wait(self, name: str, *, namespace: str | None = None, timeout: float | None = None) -> RemoteJob:
        """Return the job once it has finished. Raises TimeoutError when it has not within `timeout` seconds."""
        return await asyncio.to_thread(self._client.wait, name, namespace=namespace, timeout=timeout)

    async def follow(self, name: str, *, namespace: str | None = None) -> AsyncIterator[RemoteJob]:
        """Yield the job now and after every change, until it has finished."""
        async for job in _threaded(self._client.follow(name, namespace=namespace)):
            yield job

    async def metrics(self, name: str, *, namespace: str | None = None) -> "_Rows":
        """Return the figures of the job's steps, as `Client.metrics` does."""
        return await asyncio.to_thread(self._client.metrics, name, namespace=namespace)

    async def stacks(self, name: str, *, namespace: str | None = None, ranks: set[int] | None = None) -> "Stacks":
        """Return where the job's ranks are at the moment, as `Client.stacks` does."""
        return await asyncio.to_thread(self._client.stacks, name, namespace=namespace, ranks=ranks)

    async def logs(
        self,
        name: str,
        *,
        namespace: str | None = None,
        ranks: set[int] | None = None,
        attempt: int | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[str]:
        """Yield the log lines of the job's ranks, as `Client.logs` does."""
        lines = await asyncio.to_thread(
            self._client.logs, name, namespace=namespace, ranks=ranks, attempt=attempt, tail=tail, follow=follow
        )
        async for line in _threaded(lines):
            yield line


async def _threaded(items: Iterator[Item]) -> AsyncIterator[Item]:
    """Yield the items, each awaited from a thread."""
    # A StopIteration cannot be raised into a future.
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield item
