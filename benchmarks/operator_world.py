"""Where the operator is measured: a real control plane, kwok's nodes, an operator, and somebody who watches pods.

Every wait has a limit, and says what it waited for. Whatever is started here ends with the benchmark, even if that is
killed.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
import yaml

from disttrain_api.names import Label, Role
from disttrain_operator.decide.observed import job_facts
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.kubeconfig import find_access
from disttrain_operator.kube.lists import list_pages
from disttrain_operator.plan.desired import GangPlan, Site
from disttrain_operator.snapshot import core_collection, job_collection
from tools.cluster.api import ApiClient, wait_for
from tools.cluster.control_plane import ControlPlane
from tools.cluster.paths import OPERATOR_PATH, REPOSITORY
from tools.cluster.ports import free_port
from tools.cluster.processes import dying_with_parent

NAMESPACE = "benchmark"
OWNER = "owner"
UNKNOWN_UID = "00000000-0000-4000-8000-000000000000"
"""UID of a job whose children are built before it is there."""
IMAGE = "registry.example/train:1"
Result = TypeVar("Result")
_ADDED = (b'{"type":"ADDED"',)
_MODIFIED = (b'{"type":"MODIFIED"',)


class StuckError(Exception):
    """Something that was waited for did not come."""


def manifest(name: str, replicas: int, *, managed_by: str | None = None, **run_policy: Any) -> dict[str, Any]:
    """A usual job of our own trainer."""
    resources = {"requests": {"cpu": "10m", "memory": "16Mi"}}
    container = {"name": "trainer", "image": IMAGE, "resources": resources}
    training = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "steps": 100, "microBatchSize": 8}
    return {
        "apiVersion": "disttrain.io/v1alpha1",
        "kind": "DistTrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "workers": {"replicas": replicas, "template": {"spec": {"containers": [container]}}},
            "training": training,
            "runPolicy": run_policy,
        }
        | ({"managedBy": managed_by} if managed_by else {}),
    }


def pod_bodies(name: str, replicas: int, owner_uid: str) -> list[bytes]:
    """The pods that the operator would make, under a label that it does not watch, owned by something that exists."""
    raw = manifest(name, replicas)
    raw["metadata"] |= {"uid": UNKNOWN_UID, "resourceVersion": "1"}
    plan = GangPlan(job_facts(raw), 1, Site(trainer_image=IMAGE, token=""))
    pods = [plan.pod(Role.WORKER, index) for index in range(replicas)]
    for pod in pods:
        pod["metadata"]["labels"][Label.MANAGED_BY] = "nobody"
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": OWNER, "uid": owner_uid, "controller": True}
        pod["metadata"]["ownerReferences"] = [owner]
    return [orjson.dumps(pod) for pod in pods]


@dataclass
class World:
    """What a benchmark has at hand."""

    control_plane: ControlPlane
    client: Client
    operator: "OperatorUnderTest"
    _runner: asyncio.Runner

    def run(self, work: Coroutine[Any, Any, float | None]) -> float:
        """The figure that a measurement ends in."""
        return self.result(work) or 0.0

    def result(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Whatever the work ends in."""
        return self._runner.run(work)

    def cluster_cpu_seconds(self) -> float:
        """What API server, etcd and controllers have spent so far, in user and system mode."""
        running = (daemon.running() for daemon in self.control_plane.daemons())
        return sum(cpu_seconds(process.pid) for process in running if process is not None)

    async def floor(self, jobs: Sequence[tuple[str, int]]) -> float:
        """Seconds until the pods of these (name, replicas) are there when nobody else is needed."""
        owner = await self.client.get(f"{core_collection('configmaps', NAMESPACE)}/{OWNER}")
        bodies = [body for name, replicas in jobs for body in pod_bodies(name, replicas, owner["metadata"]["uid"])]
        pods = core_collection("pods", NAMESPACE)
        async with self.all_created(len(bodies)) as watching:
            began = time.perf_counter()
            await asyncio.gather(*(self.client.create(pods, body) for body in bodies))
            return await watching - began

    async def direct_to_running(self, name: str, pods: int) -> float:
        """Seconds from the POST of as many pods as a job has until all run, with nobody between. Then they are gone."""
        owner = await self.client.get(f"{core_collection('configmaps', NAMESPACE)}/{OWNER}")
        bodies = pod_bodies(name, pods, owner["metadata"]["uid"])
        path = core_collection("pods", NAMESPACE)
        async with self.all_seen(pods, running) as watching:
            began = time.perf_counter()
            await asyncio.gather(*(self.client.create(path, body) for body in bodies))
            seconds = await watching - began
        await self.clear()
        return seconds

    async def ours(self, jobs: Sequence[tuple[str, int]]) -> float:
        """Seconds from the POST of these jobs until their pods are there."""
        bodies = [orjson.dumps(manifest(name, replicas)) for name, replicas in jobs]
        async with self.all_created(sum(replicas for _, replicas in jobs)) as watching:
            began = time.perf_counter()
            await asyncio.gather(*(self.client.create(job_collection(NAMESPACE), body) for body in bodies))
            return await watching - began

    def measured(self, name: str, pods: int, repeats: int, **run_policy: Any) -> tuple[list[float], list[float]]:
        """Seconds of a job to run, and of as many pods POSTed directly, in turn."""
        ours, direct = [], []
        for number in range(repeats):
            ours.append(self.run(self.post_to_running(f"{name}-{number}", pods, **run_policy)))
            direct.append(self.run(self.floor([(f"direct-{name}-{number}", pods)])))
            self.run(self.clear())
        return ours, direct

    async def post_to_running(self, name: str, pods: int, **run_policy: Any) -> float:
        """Seconds from the POST of a job until its status says that it runs. Afterwards it and its pods are gone."""
        began = time.perf_counter()
        made = await self.client.create(job_collection(NAMESPACE), orjson.dumps(manifest(name, pods, **run_policy)))
        async with asyncio.timeout(600):
            await self._running(name, made["metadata"]["resourceVersion"])
        seconds = time.perf_counter() - began
        await self.clear()
        return seconds

    async def _running(self, name: str, version: str) -> None:
        query = {"watch": "true", "resourceVersion": version, "fieldSelector": f"metadata.name={name}"}
        async with self.client.stream(job_collection(NAMESPACE), query, silence=600) as chunks:
            rest = b""
            async for chunk in chunks:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if (orjson.loads(line)["object"].get("status") or {}).get("phase") == "Running":
                        return
        raise StuckError(f"the watch of {name} has ended: {self.operator.state()}")

    async def clear(self) -> None:
        """No job and no pod is left, and nobody is busy with them."""
        await self.client.request("DELETE", job_collection(NAMESPACE))
        pods = core_collection("pods", NAMESPACE)
        deadline = time.monotonic() + 300
        while (await self.client.get(pods, {"limit": "1"}))["items"]:
            # Some at a time: the answer has all of them, and no answer may take more than the operator reads.
            await self.client.request("DELETE", pods, query={"limit": "200"}, body={"gracePeriodSeconds": 0})
            self._check(deadline, "pods remain although all were deleted")
        await asyncio.sleep(0.3)

    async def wait_for_phase(self, phase: str, jobs: int, seconds: float) -> None:
        """Until so many jobs are in this phase."""
        deadline = time.monotonic() + seconds
        while True:
            found = [job async for job in self._jobs() if (job.get("status") or {}).get("phase") == phase]
            if len(found) >= jobs:
                return
            self._check(deadline, f"{len(found)} of {jobs} jobs are {phase}")
            await asyncio.sleep(1)

    async def _jobs(self) -> AsyncIterator[dict[str, Any]]:
        async for page in list_pages(self.client, job_collection(NAMESPACE), {}):
            for job in page.objects:
                yield job

    def all_created(self, count: int) -> AbstractAsyncContextManager[asyncio.Task[float]]:
        """Within the block: the moment when a watcher has been told of `count` pods."""
        return self.all_seen(count, exists)

    @asynccontextmanager
    async def all_seen(
        self, count: int, counts: Callable[[dict[str, Any]], bool], seconds: float = 300
    ) -> AsyncIterator[asyncio.Task[float]]:
        """Within the block: the moment when a watcher has been told of `count` pods that count."""
        watcher = ObjectCounter(self.client, core_collection("pods", NAMESPACE), counts)
        watching = asyncio.create_task(watcher.until(count))
        try:
            async with asyncio.timeout(seconds):
                await watcher.watches.wait()
                yield watching
                await watching
        except TimeoutError:
            raise StuckError(f"{watcher.seen} of {count} pods after {seconds} s: {self.operator.state()}") from None
        finally:
            watching.cancel()

    def _check(self, deadline: float, problem: str) -> None:
        if time.monotonic() > deadline or not self.operator.alive():
            raise StuckError(f"{problem}: {self.operator.state()}")


def exists(raw: dict[str, Any]) -> bool:
    """Any object."""
    return True


def running(pod: dict[str, Any]) -> bool:
    """A pod that runs."""
    return bool((pod.get("status") or {}).get("phase") == "Running")


class ObjectCounter:
    """Counts the objects of a collection that `counts` is true of: each once, also when it is gone again."""

    def __init__(self, client: Client, path: str, counts: Callable[[dict[str, Any]], bool] = exists) -> None:
        self._client, self._path, self._counts = client, path, counts
        self._uids: set[str] = set()
        self.watches = asyncio.Event()

    @property
    def seen(self) -> int:
        return len(self._uids)

    async def until(self, count: int) -> float:
        """The time at which there had been so many."""
        while True:
            # An API server ends watches whose client is slow, which on a busy machine happens: go on from a list.
            async for page in list_pages(self._client, self._path, {}):
                self._note(page.objects)
                version = page.version
            query = {"watch": "true", "resourceVersion": str(version)}
            async with self._client.stream(self._path, query, silence=120) as chunks:
                self.watches.set()
                rest = b""
                while self.seen < count and (chunk := await anext(chunks, b"")):
                    *lines, rest = (rest + chunk).split(b"\n")
                    known = _ADDED if self._counts is exists else _ADDED + _MODIFIED
                    self._note(orjson.loads(line)["object"] for line in lines if line.startswith(known))
                if self.seen >= count:
                    return time.perf_counter()

    def _note(self, objects: Iterable[dict[str, Any]]) -> None:
        self._uids.update(raw["metadata"]["uid"] for raw in objects if self._counts(raw))


class OperatorUnderTest:
    """`disttrain-operator` as a process."""

    def __init__(self, kubeconfig: Path, folder: Path, *flags: str, ready_seconds: float = 60) -> None:
        self.log = folder / "operator.log"
        port = self._port = free_port()
        command = [sys.executable, "-m", "disttrain_operator", f"--kubeconfig={kubeconfig}", "--log-level=WARNING"]
        command += ["--health-address=127.0.0.1", f"--health-port={port}", *flags]
        with self.log.open("wb") as output:
            environment = os.environ | {"PYTHONPATH": OPERATOR_PATH}
            self.process = subprocess.Popen(dying_with_parent(command), stderr=output, env=environment)
        wait_for(lambda: self._ready(port) or not self.alive(), ready_seconds, lambda: f"not ready: {self.state()}")
        if not self.alive():
            raise StuckError(self.state())

    def _ready(self, port: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return True
        except OSError:
            return False

    def alive(self) -> bool:
        return self.process.poll() is None

    def state(self) -> str:
        """For messages: whether it lives, and its last words."""
        return f"operator {'alive' if self.alive() else 'dead'}; its log ends: {self.log.read_text()[-1500:]}"

    def requests(self) -> float:
        """Asked of the API server so far, but watches."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30) as answer:
            page: str = answer.read().decode()
        counters = (line for line in page.splitlines() if line.startswith("disttrain_api_requests_total{"))
        return sum(float(line.rpartition(" ")[2]) for line in counters)

    def cpu_seconds(self) -> float:
        """Spent so far, in user and system mode."""
        return cpu_seconds(self.process.pid)

    def memory_mib(self, key: str = "VmRSS") -> float:
        """Resident memory now; with VmHWM the most there ever was."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) / 1024
        raise StuckError(self.state())

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def cpu_seconds(pid: int) -> float:
    """What a process has spent so far, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def world(*flags: str, nodes: int = 4, audit_log: Path | None = None) -> Iterator[World]:
    """A control plane with an operator; ends with the block."""
    control_plane = ControlPlane(controller_manager=True, scheduler=True, kwok=True, nodes=nodes, audit_log=audit_log)
    with tempfile.TemporaryDirectory() as folder, control_plane:
        api = control_plane.api
        crd = yaml.safe_load((REPOSITORY / "crds" / "disttrain.io_disttrainingjobs.yaml").read_text())
        api.ensure("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        api.ensure("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        api.ensure(core_collection("configmaps", NAMESPACE), {"metadata": {"name": OWNER}})
        _wait_for_account(api)
        operator = OperatorUnderTest(control_plane.kubeconfig, Path(folder), *flags)
        with asyncio.Runner() as runner:

            async def connect() -> Client:
                return Client(find_access(str(control_plane.kubeconfig)))

            client = runner.run(connect())
            try:
                yield World(control_plane, client, operator, runner)
            finally:
                operator.stop()
                runner.run(client.close())


def _wait_for_account(api: ApiClient) -> None:
    """A namespace takes pods once its default service account is there."""
    path = f"{core_collection('serviceaccounts', NAMESPACE)}/default"
    wait_for(lambda: api.ask("GET", path).status == 200, 60, lambda: "the namespace has no service account")
