"""Agents of `disttrain run` where the operator's own code asks them: as it sees them, on this machine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil
import yaml

from benchmarks.local_job import Job
from disttrain_api.agent_token import agent_token
from disttrain_api.names import AGENT_PORT, CONTAINER, Env, Role
from disttrain_api.ownership import owner_reference
from disttrain_operator.agent_client import Agent, Ask, ask_directly
from disttrain_operator.agents import Agents
from disttrain_operator.decide.observed import job_facts
from disttrain_operator.plan.identity import pod_labels, pod_name
from disttrain_operator.snapshot import World

Raw = dict[str, Any]
INTERVAL_SECONDS = 10.0
"""The operator's own default."""
PER_SECOND = 100.0
"""The same."""
HOST = "10.0.0.1"
"""An address that a pod may have; the operator takes no loopback address for one."""


@dataclass(frozen=True)
class LocalAgent:
    """The agent of the first pod of a job."""

    job: Raw
    port: int
    token: str

    @classmethod
    def of(cls, job: Job) -> "LocalAgent":
        """Return that of a job whose ranks run."""
        (path,) = job.folder.glob("disttrain-runs/*/status.yaml")
        token = agent_token((path.parent / "config" / "token").read_text())
        listens = [one for one in job.agent(0).net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        (port,) = {one.laddr.port for one in listens}
        return cls(yaml.safe_load(path.read_text()), port, token)

    @property
    def uid(self) -> str:
        return str(self.job["metadata"]["uid"])


def world_of(jobs: list[Raw], pods: int = 1) -> World:
    """What an operator knows of a cluster in which the first workers of each job run, so many of each."""
    world = World()
    for cache in (world.jobs, world.pods):
        cache.replace([], 1)
    for raw in jobs:
        metadata = {"namespace": "default", "resourceVersion": "2"} | raw["metadata"]
        whole = {**raw, "metadata": metadata}
        world.jobs.observe(whole)
        for index in range(pods):
            world.pods.observe(worker_pod(whole, index))
    return world


def worker_pod(raw: Raw, index: int) -> Raw:
    """The pod of a job's worker, which runs."""
    job = job_facts(raw)
    name = pod_name(job.name, job.uid, Role.WORKER, index, 1)
    env = [{"name": Env.AGENT_PORT, "value": str(AGENT_PORT)}]
    return {
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "uid": f"{job.uid}-{index}",
            "resourceVersion": "2",
            "labels": pod_labels(job.name, job.uid, Role.WORKER, index, 1),
            "ownerReferences": [owner_reference(job.name, job.uid)],
        },
        "spec": {"nodeName": "node-0", "containers": [{"name": CONTAINER, "env": env}]},
        "status": {"phase": "Running", "podIP": HOST, "containerStatuses": []},
    }


def asking(port_of: Callable[[Agent], int]) -> Ask:
    """Return how the operator asks, but of this machine's ports."""

    async def ask(agent: Agent, token: str, path: str) -> bytes:
        return await ask_directly(replace(agent, host="127.0.0.1", port=port_of(agent)), token, path)

    return ask


@asynccontextmanager
async def polled(
    world: World, tokens: Mapping[str, str], wake: Callable[[str], None], ask: Ask, per_second: float = PER_SECOND
) -> AsyncIterator[Agents]:
    """The operator's part that asks agents, at the operator's own pace unless another one is named, within the
    block."""
    agents = Agents(
        world, tokens.__getitem__, wake, lambda: True, interval=INTERVAL_SECONDS, per_second=per_second, ask=ask
    )
    running = asyncio.create_task(agents.run())
    try:
        yield agents
    finally:
        running.cancel()
