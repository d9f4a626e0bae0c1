"""An API server with jobs that train, and their agents: what an operator with 10,000 agents talks to, in one process.

    python -m benchmarks.simulated_cluster JOBS PODS KEYFILE

Prints the address of the API server, then serves until stdin ends. The jobs are in 100 namespaces and run already:
their statuses and pods are those that the operator's own code makes. Each trains, ten steps a second, and its first
worker's agent says so at an address of this machine. Nodes change now and then, statuses are stored, and all else that
is written is taken and forgotten. GET /figures says how old the statuses are, and what was written since the last time.
"""

import asyncio
import itertools
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from hmac import digest
from pathlib import Path
from typing import Any

import orjson
import psutil
from aiohttp import web

from benchmarks.operator_world import manifest
from benchmarks.simulated_agents import RANKS, training_ranks
from disttrain_api.agent_token import agent_token
from disttrain_api.names import HOST_AGENT_PORTS, TOKEN_HEADER, Env, Role
from disttrain_api.pod_address import pod_address
from disttrain_api.report import AgentStatus
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.observed import Admission, Observed, job_facts
from disttrain_operator.decide.reading import pod_facts
from disttrain_operator.kept_pod import keep_pod, read_pod
from disttrain_operator.plan.desired import GangPlan, Site, service
from disttrain_operator.reconcile import status_body
from disttrain_operator.snapshot import core_collection, job_collection

Raw = dict[str, Any]
NAMESPACES, NODES = 100, 100
STEPS_PER_SECOND = 10.0
SAMPLE_SECONDS, NODE_SECONDS, BOOKMARK_SECONDS = 1.0, 3.0, 60.0
_NUMBER, _NAMESPACE, _STEP = "54321", "team-of-the-job", 666_777_888
_STARTED = timestamp(datetime.now(UTC))
_JOBS, _PODS, _SERVICES, _NODES = (
    job_collection(None), core_collection("pods", None), core_collection("services", None),
    core_collection("nodes", None),
)  # fmt: skip
_ADDED_BY_SERVER = [
    {
        "apiVersion": "disttrain.io/v1alpha1",
        "fieldsType": "FieldsV1",
        "fieldsV1": {"f:status": {f"f:field{number}": {".": {}, "f:value": {}} for number in range(40)}},
        "manager": "disttrain-operator",
        "operation": "Update",
        "subresource": "status",
        "time": _STARTED,
    }
]
"""managedFields of a usual job: of what an API server answers a client reads them, too."""


def address() -> str:
    """An IPv4 address of this machine that a pod may have: the operator takes no loopback address for one."""
    for found in itertools.chain.from_iterable(psutil.net_if_addrs().values()):
        known = pod_address(found.address)
        if known is not None and known.version == 4:
            return found.address
    raise SystemExit("this machine has no IPv4 address but that of the loopback interface: pods need one")


def running_job(pods: int, host: str, port: int) -> tuple[Raw, list[Raw], Raw]:
    """A job that runs, its pods and its Service, as an operator has made them. All have the placeholders' names."""
    raw = manifest(f"job-{_NUMBER}", pods, schedulingPolicy={"gangScheduler": "Gate"})
    raw["spec"]["workers"]["processesPerPod"] = RANKS
    raw["metadata"] |= {
        "namespace": _NAMESPACE,
        "uid": f"{_NUMBER}000-0000-4000-8000-0000000{_NUMBER}",
        "resourceVersion": "1",
        "generation": 1,
        "creationTimestamp": _STARTED,
        "managedFields": _ADDED_BY_SERVER,
    }
    site = Site(trainer_image="registry.example/train:1", token="")
    job = job_facts(raw)
    plan, made = GangPlan(job, 1, site), service(job, site)
    of_job = [_running_pod(plan.pod(Role.WORKER, index), index, host, port) for index in range(pods)]
    made["metadata"] |= {"uid": f"{job.uid}-service", "resourceVersion": "1"}
    seen = tuple(pod_facts(read_pod(keep_pod(pod)), gone=False) for pod in of_job)
    before = Observed(admission=Admission())
    there = replace(before, pods=tuple(filter(None, seen)), services=frozenset({made["metadata"]["name"]}))
    for observed in (before, there, there):
        decision = decide(job_facts(raw), observed, datetime.now(UTC))
        if decision.status is not None:
            raw["status"] = status_body(job, decision.status)["status"]
    if raw["status"]["phase"] != "Running":
        raise SystemExit(f"the simulated job is {raw['status']['phase']}, and must run: {decision.message}")
    return raw, of_job, made


def _running_pod(pod: Raw, index: int, host: str, port: int) -> Raw:
    pod["metadata"] |= {"uid": f"{_NUMBER}000-0000-4000-9000-{index:012}-{_NUMBER}", "resourceVersion": "1"}
    pod["metadata"] |= {"creationTimestamp": _STARTED}
    pod["spec"] |= {"nodeName": f"node-{index % NODES}"}
    pod["spec"].pop("schedulingGates", None)
    for container in pod["spec"]["containers"]:
        for variable in container.get("env", []):
            if variable["name"] == Env.AGENT_PORT:
                variable["value"] = str(port)
    state = {"running": {"startedAt": _STARTED}}
    pod["status"] = {
        "phase": "Running",
        "podIP": host,
        "startTime": _STARTED,
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": _STARTED}],
        "containerStatuses": [
            {"name": container["name"], "image": container["image"], "ready": True, "started": True, "state": state}
            for container in pod["spec"]["containers"]
        ],
    }
    return pod


def as_text(raw: Raw, number: int) -> bytes:
    """An object of the job with this number."""
    team = f"team-{number % NAMESPACES}".encode()
    return orjson.dumps(raw).replace(_NUMBER.encode(), f"{number:05}".encode()).replace(_NAMESPACE.encode(), team)


@dataclass
class Figures:
    """What was written and seen since the last look."""

    writes: int = 0
    conflicts: int = 0
    answers: int = 0
    other_requests: int = 0
    ages: list[float] = field(default_factory=list)
    """Seconds since the step was done that a status shows: of all jobs, once a second."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two writes of the same job."""
    delays: list[float] = field(default_factory=list)
    """Seconds from an agent's answer until the write of the step that it told."""


class Cluster:
    """The jobs and what is known of their statuses."""

    def __init__(self, jobs: int, pods: int, key: bytes, host: str, port: int) -> None:
        raw, of_job, made = running_job(pods, host, port)
        self.began = time.monotonic()
        self.version = 1000
        self.figures = Figures()
        self.listed: dict[str, list[bytes]] = {_JOBS: [], _PODS: [], _SERVICES: [], _NODES: []}
        self.jobs: dict[str, Raw] = {}
        """By path."""
        self.shown: dict[str, tuple[float, float]] = {}
        """By path: when the step was done that the status shows, and when it was written."""
        self.answers: dict[bytes, bytes] = {}
        """By token, without the step."""
        self.watchers: dict[str, list[asyncio.Queue[bytes]]] = {}
        self.others: dict[str, Raw] = {}
        """Leases."""
        answer = AgentStatus(job_uid=raw["metadata"]["uid"], attempt=1, ranks=training_ranks(_STEP))
        text = answer.model_dump_json(by_alias=True, exclude_none=True).encode()
        for number in range(jobs):
            job = orjson.loads(as_text(raw, number))
            about = job["metadata"]
            self.jobs[f"{job_collection(about['namespace'])}/{about['name']}"] = job
            self.listed[_PODS] += (as_text(pod, number) for pod in of_job)
            self.listed[_SERVICES].append(as_text(made, number))
            token = agent_token(digest(key, about["uid"].encode(), sha256).hex())
            self.answers[token.encode()] = text.replace(_NUMBER.encode(), f"{number:05}".encode())
        self.nodes = [_node(number) for number in range(NODES)]

    def step(self, at: float) -> int:
        """The last step that each job has done."""
        return 1 + int((at - self.began) * STEPS_PER_SECOND)

    def answer(self, token: bytes) -> bytes | None:
        """What the agent of a job says now."""
        known = self.answers.get(token)
        self.figures.answers += 1
        return None if known is None else known.replace(str(_STEP).encode(), str(self.step(time.monotonic())).encode())

    def write(self, path: str, body: Raw) -> tuple[int, bytes]:
        """Take a status; return the code and the job as it is then."""
        job = self.jobs[path]
        if body["metadata"].get("resourceVersion") != job["metadata"]["resourceVersion"]:
            self.figures.conflicts += 1
            return (
                409,
                b'{"kind":"Status","status":"Failure","code":409,"reason":"Conflict","message":"it has changed"}',
            )
        self.version += 1
        now, former = time.monotonic(), self.shown.get(path)
        job["metadata"]["resourceVersion"], job["status"] = str(self.version), body["status"]
        text = orjson.dumps(job)
        self.tell(_JOBS, b'{"type":"MODIFIED","object":' + text + b"}\n")
        self.figures.writes += 1
        if (progress := body["status"].get("progress")) is not None:
            done = self.began + (progress["step"] - 1) / STEPS_PER_SECOND
            self.shown[path] = done, now
            if former is None or former[0] != done:
                self.figures.delays.append(now - done)
            if former is not None:
                self.figures.gaps.append(now - former[1])
        return 200, text

    def tell(self, collection: str, line: bytes) -> None:
        """Those who watch a collection."""
        for waiting in self.watchers.get(collection, []):
            waiting.put_nowait(line)

    async def sample(self) -> None:
        """How old the statuses are, again and again."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            now = time.monotonic()
            self.figures.ages += (now - done for done, _ in self.shown.values())

    async def change_nodes(self) -> None:
        """As kubelets do: one after the other writes its status again."""
        for node in itertools.cycle(self.nodes):
            await asyncio.sleep(NODE_SECONDS)
            self.version += 1
            node["metadata"]["resourceVersion"] = str(self.version)
            self.tell(_NODES, b'{"type":"MODIFIED","object":' + orjson.dumps(node) + b"}\n")

    async def bookmark(self) -> None:
        """As an API server says where watches are."""
        while True:
            await asyncio.sleep(BOOKMARK_SECONDS)
            line = orjson.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}})
            for collection in self.watchers:
                self.tell(collection, line + b"\n")

    def objects(self, collection: str) -> list[bytes]:
        """All that a collection has."""
        if collection == _JOBS:
            return [orjson.dumps(job) for job in self.jobs.values()]
        if collection == _NODES:
            return [orjson.dumps(node) for node in self.nodes]
        return self.listed.get(collection, [])


def _node(number: int) -> Raw:
    room = {"cpu": "64", "memory": "512Gi", "pods": "1000"}
    conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": _STARTED}]
    return {
        "metadata": {"name": f"node-{number}", "uid": f"node-{number}", "resourceVersion": "1", "labels": {}},
        "spec": {},
        "status": {"allocatable": room, "capacity": room, "conditions": conditions},
    }


class AgentConnection(asyncio.Protocol):
    """One request to an agent. A server for all of HTTP would take half of the machine that the operator runs on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._received = cluster, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._received.endswith(b"\r\n\r\n"):
            return
        _, _, rest = self._received.partition(f"\r\n{TOKEN_HEADER}: ".encode())
        answer = self._cluster.answer(rest.partition(b"\r\n")[0])
        status = b"200 OK" if answer is not None else b"401 Unauthorized"
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        self._transport.write(head % (status, len(answer or b"")) + (answer or b""))
        self._transport.close()


class ApiServer:
    """What the operator asks of an API server."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pages: dict[str, list[bytes]] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path, method, cluster = request.path, request.method, self._cluster
        if path == "/figures":
            figures, cluster.figures = cluster.figures, Figures()
            return web.json_response(vars(figures))
        if method == "PUT" and path.endswith("/status"):
            code, text = cluster.write(path.removesuffix("/status"), orjson.loads(await request.read()))
            return web.Response(body=text, status=code, content_type="application/json")
        if method == "GET" and path.rpartition("/")[0] in (
            "/api/v1", "/apis/disttrain.io/v1alpha1"
        ):  # fmt: skip
            return await self._watch(request) if request.query.get("watch") == "true" else self._list(request)
        cluster.figures.other_requests += "lease" not in path
        if method == "GET":
            known = cluster.others.get(path)
            refusal = {"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": path}
            return web.json_response(known or refusal, status=200 if known else 404)
        return await self._store(request)

    async def _store(self, request: web.Request) -> web.Response:
        """A review is answered with yes, a Lease is kept."""
        raw = orjson.loads(await request.read() or b"{}")
        self._cluster.version += 1
        raw.setdefault("metadata", {})["resourceVersion"] = str(self._cluster.version)
        raw["status"] = {"allowed": True}
        if "leases" in request.path:
            made = request.method == "POST"
            self._cluster.others[f"{request.path}/{raw['metadata']['name']}" if made else request.path] = raw
        return web.json_response(raw, status=201 if request.method == "POST" else 200)

    def _list(self, request: web.Request) -> web.Response:
        first, limit = int(request.query.get("continue") or 0), int(request.query.get("limit") or 10**9)
        if not first or request.path not in self._pages:
            self._pages[request.path] = self._cluster.objects(request.path)
        items = self._pages[request.path]
        last = first + limit
        metadata = {"resourceVersion": str(self._cluster.version)} | (
            {"continue": str(last)} if last < len(items) else {}
        )
        body = b'{"items":[' + b",".join(items[first:last]) + b'],"metadata":' + orjson.dumps(metadata) + b"}"
        return web.Response(body=body, content_type="application/json")

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        waiting: asyncio.Queue[bytes] = asyncio.Queue()
        watchers = self._cluster.watchers.setdefault(request.path, [])
        watchers.append(waiting)
        try:
            with suppress(ConnectionError):
                await stream.prepare(request)
                while True:
                    await stream.write(await waiting.get())
        finally:
            watchers.remove(waiting)
        return stream


async def serve(jobs: int, pods: int, key: bytes) -> None:
    """Serve until stdin ends."""
    host, loop = address(), asyncio.get_running_loop()
    clusters: list[Cluster] = []
    agents = await _agents(host, lambda: AgentConnection(clusters[0]))
    port = agents.sockets[0].getsockname()[1]
    cluster = Cluster(jobs, pods, key, host, port)
    clusters.append(cluster)
    application = web.Application(client_max_size=2**24)
    application.router.add_route("*", "/{path:.*}", ApiServer(cluster).answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    busy = [loop.create_task(work) for work in (cluster.sample(), cluster.change_nodes(), cluster.bookmark())]
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in busy:
        task.cancel()
    agents.close()
    await runner.cleanup()


async def _agents(host: str, protocol: Any) -> asyncio.Server:
    """A server at one of the ports that agents may have."""
    for port in HOST_AGENT_PORTS:
        try:
            return await asyncio.get_running_loop().create_server(protocol, host, port, backlog=1024)
        except OSError:
            continue
    raise SystemExit(f"no port from {HOST_AGENT_PORTS[0]} to {HOST_AGENT_PORTS[-1]} is free at {host}")


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]).read_bytes().strip()))
