"""How fast things come back: a gang after a pod was killed, and the work of an operator after the operator was.

Recovery: from the moment a pod is Failed (killed by SIGKILL) to all pods of the next attempt created. Reference: the
same pods deleted and created again directly, as fast as they end. Takeover: two replicas with a Lease; the leader is
ended, a job is applied at that moment, and the clock runs until the standby has created its pods.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "operator")]

from benchmarks import harness
from benchmarks.operator_world import NAMESPACE, OperatorUnderTest, StuckError, World, manifest, pod_bodies, world
from disttrain_operator.decide.gang_actions import SURVIVOR_GRACE_SECONDS
from disttrain_operator.kube.lists import list_pages
from disttrain_operator.snapshot import core_collection, job_collection

PODS = core_collection("pods", NAMESPACE)
POLL_SECONDS = 0.005
PATIENCE_SECONDS = 120.0
FORGOTTEN_AFTER_SECONDS = 30.0
ELECTED = ("--leader-elect", "--lease-namespace=default")


async def pods(there: World) -> list[dict[str, Any]]:
    """All pods of the namespace."""
    return [pod async for page in list_pages(there.client, PODS, {}) for pod in page.objects]


async def until_running(there: World, count: int) -> None:
    """kwok's nodes run so many pods."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sum(pod["status"].get("phase") == "Running" for pod in await pods(there)) < count:
        if time.monotonic() > deadline:
            raise StuckError(f"fewer than {count} pods run: {there.operator.state()}")
        await asyncio.sleep(0.1)


async def floor(there: World, name: str, count: int) -> float:
    """Seconds to delete a gang that runs, wait for its end and create it again, with nothing in between."""
    owner = await there.client.get(f"{core_collection('configmaps', NAMESPACE)}/owner")
    bodies = pod_bodies(name, count, owner["metadata"]["uid"])
    await asyncio.gather(*(there.client.create(PODS, body) for body in bodies))
    await until_running(there, count)
    running = await pods(there)

    async def delete(pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        path = f"{PODS}/{metadata['name']}"
        await there.client.delete(path, uid=metadata["uid"], grace_seconds=SURVIVOR_GRACE_SECONDS)

    async with there.all_created(2 * count) as watching:
        began = time.perf_counter()
        await asyncio.gather(*(delete(pod) for pod in running))
        while left := (await there.client.get(PODS, {"limit": "1"}))["items"]:
            if time.perf_counter() - began > FORGOTTEN_AFTER_SECONDS:
                raise StuckError(f"kwok has not ended pod {left[0]['metadata']['name']}, which was deleted")
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.gather(*(there.client.create(PODS, body) for body in bodies))
        return await watching - began


def undisturbed_floor(there: World, name: str, count: int) -> float:
    """`floor`, once more where kwok has forgotten a pod that was deleted: it does, now and then."""
    try:
        return there.run(floor(there, name, count))
    except StuckError:
        there.run(there.clear())
        return there.run(floor(there, f"{name}-again", count))


async def recovery(there: World, name: str, count: int) -> float:
    """Seconds from a killed pod to all pods of the next attempt."""
    await there.client.create(job_collection(NAMESPACE), manifest(name, count))
    await until_running(there, count)
    await there.wait_for_phase("Running", 1, PATIENCE_SECONDS)
    victim = (await pods(there))[count // 2]
    ended = {"exitCode": 137, "reason": "Error", "startedAt": None, "finishedAt": None}
    (container,) = victim["status"]["containerStatuses"]
    container |= {"ready": False, "state": {"terminated": ended}}
    victim["status"]["phase"] = "Failed"
    async with there.all_created(2 * count) as watching:
        began = time.perf_counter()
        await there.client.replace(f"{PODS}/{victim['metadata']['name']}/status", victim)
        return await watching - began


async def first_pods(there: World, name: str, count: int) -> float:
    """Seconds from now, when a job is applied, until somebody has created its pods."""
    async with there.all_created(count) as watching:
        began = time.perf_counter()
        await there.client.create(job_collection(NAMESPACE), manifest(name, count))
        return await watching - began


def takeover(there: World, how: signal.Signals, number: int) -> float:
    """Seconds from the end of the leader to the pods of a job that was applied at that moment."""
    with tempfile.TemporaryDirectory() as folder:
        standby = OperatorUnderTest(
            there.control_plane.kubeconfig, Path(folder), *ELECTED, f"--replica-name=standby-{number}"
        )
        there.run(asyncio.sleep(1.5))
        leader, there.operator = there.operator, standby
        leader.process.send_signal(how)
        seconds = there.run(first_pods(there, f"after-{how.name.lower()}-{number}", 4))
        leader.process.wait(20)
        there.run(there.clear())
        return seconds


def measure(quick: bool) -> Iterator[harness.Row]:
    repeats = 2 if quick else 5
    for count in (8, 64) if quick else (8, 64, 200):
        with world(nodes=4) as there:
            ours, floors = [], []
            for number in range(repeats):
                floors.append(undisturbed_floor(there, f"floor-{number}", count))
                there.run(there.clear())
                ours.append(there.run(recovery(there, f"job-{number}", count)))
                there.run(there.clear())
            yield harness.row(f"a pod of {count} killed to the next gang created", "s", ours, floors)
    with world(*ELECTED, "--replica-name=first", nodes=2) as there:
        there.run(asyncio.sleep(1.0))
        for how in (signal.SIGKILL, signal.SIGTERM):
            values = [takeover(there, how, number) for number in range(repeats)]
            yield harness.row(f"{how.name} of the leader to the standby's pods", "s", values)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("kopf", "aiohttp", "orjson"))
