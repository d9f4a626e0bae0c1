"""What many pods cost the operator: requests, memory, CPU; and what it asks when nothing happens.

One job of 2,000 pods, then 1,000 jobs of 8 beside it, all running on kwok's nodes; then a minute in which nothing
happens. Requests are counted from the API server's audit log, memory and CPU are those of the operator's process.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "operator")]

from benchmarks import harness
from benchmarks.operator_world import NAMESPACE, World, manifest, world
from disttrain_operator.snapshot import job_collection
from tests.integration.audit import entries_of_operator, requests_of_operator

PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True)
class Size:
    """One large job, and many small ones."""

    large: int
    small_jobs: int
    quiet_seconds: float
    small: int = 8


FULL = Size(large=2000, small_jobs=1000, quiet_seconds=60)
QUICK = Size(large=100, small_jobs=20, quiet_seconds=20)


async def run_jobs(there: World, prefix: str, jobs: int, replicas: int, running: int) -> float:
    """Seconds from the first POST until `running` jobs run."""
    began = time.perf_counter()
    slots = asyncio.Semaphore(32)

    async def create(number: int) -> None:
        async with slots:
            await there.client.create(job_collection(NAMESPACE), manifest(f"{prefix}-{number}", replicas))

    await asyncio.gather(*(create(number) for number in range(jobs)))
    await there.wait_for_phase("Running", running, PATIENCE_SECONDS)
    return time.perf_counter() - began


def measure(quick: bool) -> Iterator[harness.Row]:
    size = QUICK if quick else FULL
    nodes = (size.large + size.small * size.small_jobs) // 1000 + 2
    with tempfile.TemporaryDirectory() as folder:
        audit_log = Path(folder, "audit.log")
        with world(nodes=nodes, audit_log=audit_log) as there:
            operator = there.operator
            yield harness.Row("idle: resident memory", operator.memory_mib(), "MiB")
            steps = (("large", 1, size.large, 1), ("small", size.small_jobs, size.small, size.small_jobs + 1))
            for prefix, jobs, replicas, running in steps:
                what = f"{jobs} x {replicas} pods"
                cpu = operator.cpu_seconds()
                seconds = there.run(run_jobs(there, prefix, jobs, replicas, running))
                yield harness.Row(f"{what}: POST to all running", seconds, "s")
                yield harness.Row(f"{what}: CPU of the operator", operator.cpu_seconds() - cpu, "s")
                yield harness.Row(f"{what}: resident memory then", operator.memory_mib(), "MiB")
            yield harness.Row("highest resident memory", operator.memory_mib("VmHWM"), "MiB")
            yield from requests(audit_log, size)
            yield from quiet(there, audit_log, size.quiet_seconds)


def requests(audit_log: Path, size: Size) -> Iterator[harness.Row]:
    """Beside the reference of N + 4 per job; Events are counted apart."""
    counted = requests_of_operator(audit_log, NAMESPACE)
    # The benchmark's own, by the same client: its jobs, and its looks at them.
    own = [what for what in counted if what[:2] in (("create", "disttrainingjobs"), ("list", "disttrainingjobs"))]
    for what in own:
        del counted[what]
    events = sum(count for (_, resource, _), count in counted.items() if resource == "events")
    wanted = size.large + 4 + size.small_jobs * (size.small + 4)
    yield harness.Row("requests until all run", float(counted.total() - events), "requests", float(wanted))
    yield harness.Row("Events until all run", float(events), "requests", 2.0 * (size.small_jobs + 1))
    for (verb, resource, code), count in sorted(counted.items()):
        print(f"    {verb} {resource} {code}: {count}")


def quiet(there: World, audit_log: Path, seconds: float) -> Iterator[harness.Row]:
    """What the operator does while nothing happens."""
    there.run(asyncio.sleep(10))
    before, cpu = _asked(audit_log), there.operator.cpu_seconds()
    there.run(asyncio.sleep(seconds))
    asked = _asked(audit_log) - before
    yield harness.Row(f"{seconds:g} quiet seconds: requests but watches", float(asked.total()), "requests")
    yield harness.Row(f"{seconds:g} quiet seconds: CPU", there.operator.cpu_seconds() - cpu, "s")
    yield harness.Row("resident memory after them", there.operator.memory_mib(), "MiB")
    for what, count in asked.items():
        print(f"    asked while nothing happened: {what} {count} times")


def _asked(audit_log: Path) -> Counter[str]:
    """Requests but watches, and but the Lease's."""
    return Counter(
        f"{entry['verb']} {entry['objectRef']['resource']}"
        for entry in entries_of_operator(audit_log)
        if entry["verb"] != "watch" and (entry.get("objectRef") or {}).get("resource") not in (None, "leases")
    )


if __name__ == "__main__":
    harness.main(__doc__, measure, ("kopf", "aiohttp", "orjson"))
