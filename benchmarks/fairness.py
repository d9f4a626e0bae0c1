"""How long a tenant's job takes to run beside another tenant's thousands of jobs that are refused their pods.

The other namespace has a quota of no pods: each of its jobs is refused what it asks for and tries again now and then.
The reference is the same job, measured in the same run before there was any other. Beside it, as a measure of how busy
the machine is with other things meanwhile: the same number of pods POSTed directly, before and then.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "operator")]

from benchmarks import harness
from benchmarks.operator_world import StuckError, World, manifest, world
from disttrain_api.names import Reason
from disttrain_operator.kube.errors import NotFound
from disttrain_operator.kube.lists import list_pages
from disttrain_operator.snapshot import core_collection, job_collection

CROWD = "crowd"
PODS = 8
PATIENCE_SECONDS = 3600.0
# A job that may not have its pods waits for them for a day.
DEADLINE_SECONDS = 86_400


@dataclass(frozen=True)
class Size:
    """How many jobs are refused, and how often the other tenant's is measured."""

    refused: int
    repeats: int
    quiet_seconds: float


FULL = Size(refused=10_000, repeats=15, quiet_seconds=60)
QUICK = Size(refused=200, repeats=5, quiet_seconds=10)


def measure(quick: bool) -> Iterator[harness.Row]:
    size = QUICK if quick else FULL
    with world() as there:
        operator = there.operator
        there.measured("first", PODS, 1)
        alone, direct_alone = there.measured("alone", PODS, size.repeats)
        yield harness.row(f"job of {PODS} pods: POST to running, alone", "s", alone)
        memory, cpu = operator.memory_mib(), operator.cpu_seconds()
        there.run(close(there))
        seconds, meanwhile = there.result(crowd(there, size.refused))
        yield harness.Row(f"{size.refused} jobs: POST to all refused", seconds, "s")
        yield harness.Row("operator's CPU for it", operator.cpu_seconds() - cpu, "s")
        yield harness.Row("memory for 1,000 of them", 1000 * (operator.memory_mib() - memory) / size.refused, "MiB")
        yield harness.row("POST to running while they are made", "s", meanwhile, alone)
        beside, direct_beside = there.measured("beside", PODS, size.repeats)
        yield harness.row(f"POST to running beside {size.refused} refused", "s", beside, alone)
        yield harness.row(f"{PODS} pods POSTed directly then", "s", direct_beside, direct_alone)
        yield from waiting(there, size)


async def close(there: World) -> None:
    """A namespace in which no pod may be made."""
    client, quotas = there.client, core_collection("resourcequotas", CROWD)
    await client.create("/api/v1/namespaces", {"metadata": {"name": CROWD}})
    await client.create(quotas, {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
    async with asyncio.timeout(60):
        while not await _is_closed(there):  # noqa: ASYNC110 - of the API server, which sets no event
            await asyncio.sleep(0.1)


async def _is_closed(there: World) -> bool:
    """Whether the quota counts, and pods of this namespace have an account."""
    with suppress(NotFound):
        await there.client.get(f"{core_collection('serviceaccounts', CROWD)}/default")
        quota = await there.client.get(f"{core_collection('resourcequotas', CROWD)}/none")
        return bool((quota.get("status") or {}).get("hard"))
    return False


async def crowd(there: World, number: int) -> tuple[float, list[float]]:
    """Seconds from the first POST until all are refused; and what the other tenant's job took meanwhile."""
    began = time.perf_counter()
    making = asyncio.create_task(_make(there, number))
    meanwhile: list[float] = []
    while not making.done():
        meanwhile.append(await there.post_to_running(f"meanwhile-{len(meanwhile)}", PODS))
        await asyncio.wait({making}, timeout=15)
    await making
    deadline = began + PATIENCE_SECONDS
    while (refused := await _refused(there)) < number:
        if time.perf_counter() > deadline:
            raise StuckError(f"{refused} of {number} jobs are refused: {there.operator.state()}")
        await asyncio.sleep(2)
    return time.perf_counter() - began, meanwhile


async def _make(there: World, number: int) -> None:
    slots = asyncio.Semaphore(16)

    async def make(which: int) -> None:
        raw = manifest(f"refused-{which}", 1, startingDeadlineSeconds=DEADLINE_SECONDS)
        raw["metadata"]["namespace"] = CROWD
        async with slots:
            await there.client.create(job_collection(CROWD), raw)

    await asyncio.gather(*(make(which) for which in range(number)))


async def _refused(there: World) -> int:
    found = 0
    async for page in list_pages(there.client, job_collection(CROWD), {}):
        found += sum(_is_refused(job) for job in page.objects)
    return found


def _is_refused(job: dict[str, Any]) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(entry["reason"] == Reason.QUOTA_EXCEEDED for entry in conditions)


def waiting(there: World, size: Size) -> Iterator[harness.Row]:
    """What the jobs that wait cost while nothing else happens."""
    operator = there.operator
    cpu, asked = operator.cpu_seconds(), operator.requests()
    there.run(asyncio.sleep(size.quiet_seconds))
    per_second = (operator.requests() - asked) / size.quiet_seconds
    yield harness.Row("requests while they wait", per_second, "1/s")
    yield harness.Row("operator's CPU while they wait", (operator.cpu_seconds() - cpu) / size.quiet_seconds, "cores")
    yield harness.Row("highest resident memory", operator.memory_mib("VmHWM"), "MiB")


if __name__ == "__main__":
    harness.main(__doc__, measure, ("kopf", "aiohttp", "orjson"))
