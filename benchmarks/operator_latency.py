"""From the POST of a job to the last of its pods created, as somebody who watches pods sees it.

The floor, measured in the same run and in turn: the same pods, serialised beforehand, POSTed directly by the same
client with as many requests in flight. So the ratio is what the operator adds: noticing the job, deciding, writing the
attempt into its status before anything is made, Service and Secret, building the pods, and its own share of the CPU.

A real etcd, kube-apiserver, scheduler and controller-manager; the nodes are kwok's. All of it runs on this one machine,
so the API server, which does most of the work, is disturbed by whatever the operator spends.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "operator")]

import orjson
import yaml

from benchmarks import harness
from disttrain_api.names import Label, Role
from disttrain_operator.decide.observed import job_facts
from disttrain_operator.kube.auth import find_access
from disttrain_operator.kube.client import Client
from disttrain_operator.plan.desired import GangPlan, Site
from disttrain_operator.snapshot import core_collection, job_collection
from tests.cluster.api import ApiClient, wait_for
from tests.cluster.control_plane import ControlPlane
from tests.cluster.ports import free_port

NAMESPACE = "benchmark"
OWNER = "owner"
SIZES = (8, 64, 200)
REPEATS = 7


def manifest(name: str, replicas: int) -> dict[str, Any]:
    """A job with a usual template."""
    resources = {"requests": {"cpu": "10m", "memory": "16Mi"}}
    container = {"name": "trainer", "image": "registry.example/train:1", "command": ["train"], "resources": resources}
    return {
        "apiVersion": "disttrain.io/v1alpha1",
        "kind": "DistTrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"workers": {"replicas": replicas, "template": {"spec": {"containers": [container]}}}},
    }


def pod_bodies(name: str, replicas: int, owner_uid: str) -> list[bytes]:
    """The pods that the operator would make, under a label that it does not watch, owned by something that exists."""
    raw = manifest(name, replicas)
    raw["metadata"] |= {"uid": "00000000-0000-4000-8000-000000000000", "resourceVersion": "1"}
    plan = GangPlan(job_facts(raw), 1, Site(trainer_image="registry.example/train:1", token=""))
    pods = [plan.pod(Role.WORKER, index) for index in range(replicas)]
    for pod in pods:
        pod["metadata"]["labels"][Label.MANAGED_BY] = "nobody"
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": OWNER, "uid": owner_uid, "controller": True}
        pod["metadata"]["ownerReferences"] = [owner]
    return [orjson.dumps(pod) for pod in pods]


@asynccontextmanager
async def all_created(client: Client, count: int) -> AsyncIterator[asyncio.Task[float]]:
    """Within the block: the moment when the watch has told of `count` new pods."""
    pods = core_collection("pods", NAMESPACE)
    version = (await client.get(pods, {"limit": "1"}))["metadata"]["resourceVersion"]
    query = {"watch": "true", "resourceVersion": version}
    async with client.stream(pods, query, silence=120) as chunks:

        async def count_them() -> float:
            seen = 0
            async for chunk in chunks:
                seen += chunk.count(b'{"type":"ADDED"')
                if seen >= count:
                    break
            return time.perf_counter()

        watching = asyncio.create_task(count_them())
        yield watching
        await watching


async def floor(client: Client, name: str, replicas: int) -> float:
    """Seconds for the pods alone."""
    owner = await client.get(f"{core_collection('configmaps', NAMESPACE)}/{OWNER}")
    bodies = pod_bodies(name, replicas, owner["metadata"]["uid"])
    pods = core_collection("pods", NAMESPACE)
    async with all_created(client, replicas) as watching:
        began = time.perf_counter()
        await asyncio.gather(*(client.create(pods, body) for body in bodies))
        return await watching - began


async def ours(client: Client, name: str, replicas: int) -> float:
    """Seconds for the job."""
    body = orjson.dumps(manifest(name, replicas))
    async with all_created(client, replicas) as watching:
        began = time.perf_counter()
        await client.create(job_collection(NAMESPACE), body)
        return await watching - began


async def clear(client: Client) -> None:
    """No job and no pod is left, and nobody is busy with them."""
    await client.request("DELETE", job_collection(NAMESPACE))
    await client.request("DELETE", core_collection("pods", NAMESPACE), body={"gracePeriodSeconds": 0})
    for _ in range(1000):
        if not (await client.get(core_collection("pods", NAMESPACE), {"limit": "1"}))["items"]:
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)


async def measured(kubeconfig: Path, sizes: tuple[int, ...], repeats: int) -> list[harness.Row]:
    client = Client(find_access(str(kubeconfig)))
    values: dict[int, list[float]] = {size: [] for size in sizes}
    floors: dict[int, list[float]] = {size: [] for size in sizes}
    try:
        for repeat in range(-1, repeats):  # the first round warms connections and caches on both sides
            for size in sizes:
                for what, into in ((floor, floors), (ours, values)):
                    seconds = await what(client, f"job-{size}-{max(repeat, 0)}", size)
                    await clear(client)
                    if repeat >= 0:
                        into[size].append(seconds)
    finally:
        await client.close()
    return [harness.row(f"job of {size} pods: POST to all created", "s", values[size], floors[size]) for size in sizes]


def wait_for_account(api: ApiClient) -> None:
    """A namespace takes pods once its default service account is there."""
    path = f"{core_collection('serviceaccounts', NAMESPACE)}/default"
    wait_for(lambda: api.ask("GET", path).status == 200, 60, lambda: "the namespace has no service account")


def start_operator(kubeconfig: Path, log: Path) -> subprocess.Popen[bytes]:
    """Returns when it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "disttrain_operator", f"--kubeconfig={kubeconfig}"]
    command += ["--health-address=127.0.0.1", f"--health-port={port}"]
    paths = os.pathsep.join(str(REPOSITORY / part) for part in ("api", "operator"))
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output, env=os.environ | {"PYTHONPATH": paths})
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return process
        except OSError:
            time.sleep(0.1)
    process.kill()
    raise SystemExit(f"the operator is not ready:\n{log.read_text()}")


def _control_plane() -> ControlPlane:
    return ControlPlane(controller_manager=True, scheduler=True, kwok=True, nodes=4)


def measure(quick: bool) -> Iterator[harness.Row]:
    sizes, repeats = ((8, 64), 3) if quick else (SIZES, REPEATS)
    with tempfile.TemporaryDirectory() as folder, _control_plane() as control_plane:
        api = control_plane.api
        crd = yaml.safe_load((REPOSITORY / "crds" / "disttrain.io_disttrainingjobs.yaml").read_text())
        api.ensure("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        api.ensure("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        api.ensure(core_collection("configmaps", NAMESPACE), {"metadata": {"name": OWNER}})
        wait_for_account(api)
        operator = start_operator(control_plane.kubeconfig, Path(folder, "operator.log"))
        try:
            yield from asyncio.run(measured(control_plane.kubeconfig, sizes, repeats))
        finally:
            operator.terminate()
            operator.wait(20)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("kopf", "aiohttp", "orjson", "uvloop"))
