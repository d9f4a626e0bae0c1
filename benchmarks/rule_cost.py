"""What the definition's rules cost the API server: its CPU for the POST of a job and for the PUT of a status.

The reference is an API server of the same kind beside it whose definition has no rules. Both get the same requests, one
after the other over one kept connection, in turns. The CPU is that of the process, collections of its garbage included.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "operator")]

from benchmarks import harness
from benchmarks.requests_alone import job_requests
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.kubeconfig import from_kubeconfig
from disttrain_operator.snapshot import job_collection
from tests.integration.operator_process import CRD
from tools.cluster.api import wait_for
from tools.cluster.control_plane import ControlPlane

Raw = dict[str, Any]
JOB = REPOSITORY / "examples" / "ddp-checkpoint.yaml"
JOBS = job_collection("default")


def without_rules(value: Any) -> Any:
    """Return a copy of a definition in which nothing is left but types and bounds."""
    if isinstance(value, dict):
        return {key: without_rules(item) for key, item in value.items() if key != "x-kubernetes-validations"}
    return [without_rules(item) for item in value] if isinstance(value, list) else value


class Measured:
    """An API server with a definition of jobs."""

    def __init__(self, control_plane: ControlPlane, definition: Raw) -> None:
        """Returns when jobs can be created."""
        self._control_plane = control_plane
        self._job: Raw = yaml.safe_load(JOB.read_text())
        self._status = json.loads(job_requests("any", 2, "uid").status[1])["status"]
        self._count = 0
        control_plane.api.ensure("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        wait_for(lambda: control_plane.api.ask("GET", JOBS).status == 200, 60, lambda: "jobs cannot be listed")

    async def milliseconds(self, requests: int) -> tuple[float, float]:
        """Return the CPU of one POST and of one PUT, on average over so many."""
        client = Client(from_kubeconfig([self._control_plane.kubeconfig]))
        try:
            began, made = self._cpu_seconds(), []
            for _ in range(requests):
                self._count += 1
                made.append(await client.create(JOBS, self._job | {"metadata": {"name": f"job-{self._count}"}}))
            then = self._cpu_seconds()
            for job in made:
                await client.replace(f"{JOBS}/{job['metadata']['name']}/status", job | {"status": self._status})
        finally:
            await client.close()
        return (then - began) / requests * 1000, (self._cpu_seconds() - then) / requests * 1000

    def _cpu_seconds(self) -> float:
        running = self._control_plane.api_server.running()
        assert running is not None
        return sum(psutil.Process(running.pid).cpu_times()[:2])


async def costs(definitions: Iterable[Raw], requests: int, rounds: int) -> AsyncIterator[list[tuple[float, float]]]:
    """Yield, round by round, the milliseconds of a POST and of a PUT with each of these definitions."""
    with ExitStack() as stack:
        every = [Measured(stack.enter_context(ControlPlane()), definition) for definition in definitions]
        for measured in every:
            await measured.milliseconds(requests // 4)
        for _ in range(rounds):
            yield [await measured.milliseconds(requests) for measured in every]


async def _all_costs(requests: int, rounds: int) -> list[list[tuple[float, float]]]:
    definition = yaml.safe_load(CRD.read_text())
    return [found async for found in costs((definition, without_rules(definition)), requests, rounds)]


def measure(quick: bool) -> Iterable[harness.Row]:
    """Yield a row for each kind of request."""
    found = asyncio.run(_all_costs(60 if quick else 300, 2 if quick else 5))
    for number, name in enumerate(("POST of a job", "PUT of its status")):
        with_rules, without = ([of_round[place][number] for of_round in found] for place in (0, 1))
        yield harness.row(name, "ms of CPU", with_rules, without)


if __name__ == "__main__":
    harness.main(__doc__, measure)
