"""How long a tenant's job takes to run beside another tenant's thousands of jobs that are refused their pods.

The other namespace has a quota of no pods: each of its jobs is refused what it asks for and tries again now and then.
The reference is the same job, measured in the same run before there was any other. Beside it, as a measure of how busy
the machine is with other things meanwhile: the same number of pods POSTed directly, before and then.

While those jobs are made the API server and its machine are busy with that alone. So jobs are made twice, sixteen POSTs
at a time without a pause: first ones that are left to somebody else (`managedBy`), which the operator does nothing
for; then those that it is refused the pods of. What another tenant's job and bare pods take in the first flood is the
floor: what the cluster itself costs under that load. The ratio to it is what the operator's work for the crowd adds.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "operator")]

from benchmarks import harness
from benchmarks.operator_world import ObjectCounter, StuckError, World, manifest, world
from disttrain_api.names import Reason
from disttrain_operator.kube.errors import NotFound
from disttrain_operator.snapshot import core_collection, job_collection

CROWD = "crowd"
PODS = 8
PATIENCE_SECONDS = 3600.0
# A job that may not have its pods waits for them for a day.
DEADLINE_SECONDS = 86_400
AT_A_TIME = 16
SECONDS_OF_FLOOD_FIRST = 3
SECONDS_OF_REST = 10
"""After the flood: jobs whose time to ask has passed meanwhile are looked at within some seconds."""


@dataclass(frozen=True)
class Size:
    """How many jobs are refused, and how often the other tenant's is measured."""

    refused: int
    repeats: int
    quiet_seconds: float


FULL = Size(refused=10_000, repeats=15, quiet_seconds=60)
QUICK = Size(refused=200, repeats=3, quiet_seconds=10)


def measure(quick: bool, jobs: int | None = None) -> Iterator[harness.Row]:
    size = QUICK if quick else FULL
    size = size if jobs is None else replace(size, refused=jobs)
    with world() as there:
        operator = there.operator
        there.measured("first", PODS, 1)
        alone, direct_alone = there.measured("alone", PODS, size.repeats)
        yield harness.row(f"job of {PODS} pods: POST to running, alone", "s", alone)
        bare_alone = [
            there.run(there.direct_to_running(f"bare-alone-{number}", PODS)) for number in range(size.repeats)
        ]
        yield harness.row(f"{PODS} bare pods: POST to running, alone", "s", bare_alone)
        there.run(close(there))
        spent = there.cluster_cpu_seconds()
        floor = there.result(flood(there, "others", Size(1, size.repeats, 0), managed_by="example.com/nobody"))
        yield harness.Row("jobs of nobody's made, per second", floor.per_second, "1/s")
        cheap = 1000 * (there.cluster_cpu_seconds() - spent) / floor.made
        yield harness.Row("the cluster's CPU for one", cheap, "ms")
        yield harness.row("bare pods while those are made", "s", floor.bare, bare_alone)
        yield harness.row("job while those are made: the floor", "s", floor.jobs, alone)
        there.run(empty(there))
        memory, cpu, asked = operator.memory_mib(), operator.cpu_seconds(), operator.requests()
        began, spent = time.perf_counter(), there.cluster_cpu_seconds()
        busy = there.result(flood(there, "refused", size))
        yield harness.Row("jobs that are refused made, per second", busy.per_second, "1/s")
        yield harness.Row("load of the machine by then", os.getloadavg()[0], "")
        yield harness.row("bare pods while those are made", "s", busy.bare, floor.bare)
        yield harness.row("job while those are made, to the floor", "s", busy.jobs, floor.jobs)
        yield harness.row("job while those are made, to alone", "s", busy.jobs, alone)
        there.run(all_refused(there, busy.made))
        yield harness.Row(f"{busy.made} jobs: POST to all refused", time.perf_counter() - began, "s")
        dear = 1000 * (there.cluster_cpu_seconds() - spent) / busy.made
        yield harness.Row("the cluster's CPU for one", dear, "ms", cheap)
        yield harness.Row("operator's CPU for one", 1000 * (operator.cpu_seconds() - cpu) / busy.made, "ms")
        yield harness.Row("requests for one", (operator.requests() - asked) / busy.made, "")
        yield harness.Row("memory for 1,000 of them", 1000 * (operator.memory_mib() - memory) / busy.made, "MiB")
        at_once = [there.run(there.post_to_running("at-once", PODS))]
        yield harness.row("POST to running right after the last was refused", "s", at_once, alone)
        there.run(asyncio.sleep(SECONDS_OF_REST))
        beside, direct_beside = there.measured("beside", PODS, size.repeats)
        yield harness.row(f"POST to running beside {busy.made} refused", "s", beside, alone)
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


@dataclass
class Flood:
    """What was made of jobs, and what others took meanwhile."""

    made: int = 0
    per_second: float = 0.0
    jobs: list[float] = field(default_factory=list)
    """Seconds of another tenant's job, from its POST until it runs."""
    bare: list[float] = field(default_factory=list)
    """Seconds of as many bare pods."""


async def flood(there: World, name: str, size: Size, *, managed_by: str | None = None) -> Flood:
    """Make jobs without a pause: as many as wanted, and until the others were measured as often as wanted."""
    result, over = Flood(), asyncio.Event()

    async def make() -> None:
        while not over.is_set() or result.made < size.refused:
            raw = manifest(f"{name}-{result.made}", 1, managed_by=managed_by, startingDeadlineSeconds=DEADLINE_SECONDS)
            raw["metadata"]["namespace"] = CROWD
            result.made += 1
            await there.client.create(job_collection(CROWD), raw)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as making:
        for _ in range(AT_A_TIME):
            making.create_task(make())
        await asyncio.sleep(SECONDS_OF_FLOOD_FIRST)
        for number in range(size.repeats):
            result.jobs.append(await there.post_to_running(f"{name}-meanwhile-{number}", PODS))
            result.bare.append(await there.direct_to_running(f"{name}-bare-{number}", PODS))
        over.set()
    result.per_second = result.made / (time.perf_counter() - began)
    return result


async def empty(there: World) -> None:
    """The crowd's jobs are gone."""
    jobs = job_collection(CROWD)
    while (await there.client.get(jobs, {"limit": "1"}))["items"]:
        await there.client.request("DELETE", jobs, query={"limit": "100"})
    await asyncio.sleep(2)


async def all_refused(there: World, number: int) -> None:
    """Returns when so many jobs have said that they are refused. By a watch: to list thousands of them again and again
    would keep the API server busier than they do."""
    counter = ObjectCounter(there.client, job_collection(CROWD), _is_refused)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await counter.until(number)
    except TimeoutError:
        raise StuckError(f"{counter.seen} of {number} jobs are refused: {there.operator.state()}") from None


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
    harness.main(__doc__, measure, ("kopf", "aiohttp", "orjson"), {"jobs": "how many jobs are refused"})
