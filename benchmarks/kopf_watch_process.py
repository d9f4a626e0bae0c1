"""A process of kopf_watch.py: follows jobs that nobody has made. Arguments: kopf or informer, and how many jobs.

Prints JSON: ms of CPU per job of the list and per event, and KiB of memory per job at the most.
"""

import asyncio
import json
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import orjson

from disttrain_operator.host import Host
from disttrain_operator.kube.cache import Cache, Raw
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.informer import Informer
from disttrain_operator.kube.kopf_watch import KopfWatch
from disttrain_operator.snapshot import job_collection

NAMESPACES = 100
CONDITIONS = ("Queued", "Running", "Suspended", "Complete", "Failed", "Finished")


def job(number: int, version: int) -> Raw:
    container = {"name": "trainer", "image": "x" * 60, "command": ["python", "train.py"] * 5}
    return {
        "metadata": {
            "name": f"job-{number}",
            "namespace": f"team-{number % NAMESPACES}",
            "uid": f"uid-{number:08}",
            "resourceVersion": str(version),
        },
        "spec": {"workers": {"replicas": 2, "template": {"spec": {"containers": [container]}}}},
        "status": {"conditions": [{"type": kind, "status": "False", "message": "y" * 100} for kind in CONDITIONS]},
    }


class Played:
    """What an API server would answer to a client: a list of jobs, then an event of each once `changed` is set."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.changed = jobs, asyncio.Event()
        # Ahead of what is measured.
        self._listed = [orjson.dumps(job(at, at + 1)) for at in range(jobs)]
        self._events = [
            orjson.dumps({"type": "MODIFIED", "object": job(at, jobs + at + 1)}) + b"\n" for at in range(jobs)
        ]

    async def read(self, path: str, query: dict[str, str], most: int, **_: object) -> bytes:
        first, limit = int(query.get("continue") or 0), int(query["limit"])
        last = min(self.jobs, first + limit)
        metadata = {"resourceVersion": str(self.jobs), "continue": str(last) if last < self.jobs else ""}
        items = b",".join(self._listed[first:last])
        return b'{"items":[' + items + b'],"metadata":' + orjson.dumps(metadata) + b"}"

    @asynccontextmanager
    async def stream(self, path: str, query: dict[str, str], **_: object) -> AsyncIterator[AsyncIterator[bytes]]:
        yield self._told(int(query["resourceVersion"]))

    async def _told(self, since: int) -> AsyncIterator[bytes]:
        await self.changed.wait()
        for event in self._events[since - self.jobs :]:
            yield event
            await asyncio.sleep(0)
        await asyncio.Event().wait()


class Engine:
    """Has kopf watch, and does nothing else."""

    def __init__(self, jobs: list[KopfWatch]) -> None:
        self.jobs = jobs

    async def prepare(self) -> None:
        """Nothing."""

    async def work(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing."""


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_kib() -> float:
    """What this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1024


async def main(by: str, jobs: int) -> None:
    played, cache = Played(jobs), Cache(group_of=lambda raw: "all")
    kind: Any = KopfWatch if by == "kopf" else Informer
    watch = kind(cast(Client, played), job_collection(None), cache)
    before, most, times = resident_kib(), 0.0, [cpu_seconds()]
    following = asyncio.create_task(Host(Engine([watch])).run() if by == "kopf" else watch.run())
    await watch.wait_synced()
    times.append(cpu_seconds())
    played.changed.set()
    while any(int(raw["metadata"]["resourceVersion"]) <= jobs for raw in cache.objects()):
        most = max(most, resident_kib())
        await asyncio.sleep(0.1)
        assert not following.done()
    times.append(cpu_seconds())
    listed, told = ((end - begin) / jobs * 1000 for begin, end in pairwise(times))
    print(json.dumps([listed, told, (max(most, resident_kib()) - before) / jobs]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
