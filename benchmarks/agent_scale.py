"""What asking many agents costs the operator, how old its figures are, and what an agent costs beside its ranks.

The operator's code that asks agents, at its own pace (each job once in 10 s, 100 jobs a second) and at ten times that
rate, in this process, which knows the pods of all; the agents are one server on the loopback interface, in another
process. Each answer has another step, so each would wake its job; what the operator then decides and writes is not part
of this. The age of a job's figures is the time between two answers of its agent; the reference is the pace.

A gang that hangs: the last rank of the last pod is stopped, and the others wait for it. From then until the operator's
code names that rank, which it does where all agents of the gang have answered four times; the reference is three median
steps and two seconds. The agents are that one server, so gangs share a processor with all of their agents.

An agent beside its ranks: a local run of two ranks, whose agent is asked once in 10 s, and CPU by /proc.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
PATHS = [str(REPOSITORY), *(str(REPOSITORY / package) for package in ("api", "operator", "trainer_image"))]
sys.path[:0] = PATHS

from benchmarks import harness
from benchmarks.local_agents import INTERVAL_SECONDS, PER_SECOND, LocalAgent, asking, polled, world_of
from benchmarks.local_job import TRAINING, running
from benchmarks.local_start import DISTTRAIN
from benchmarks.simulated_agents import PACE, HangingPod
from benchmarks.simulated_agents import RANKS as SIMULATED_RANKS
from disttrain_operator.agent_client import Agent

ROUNDS, QUICK_ROUNDS = 4, 1
RANKS = 2
MOST_PER_SECOND = 1000.0
"""With it 10,000 jobs have figures as new as the pace."""
PODS = 10
"""A job has so many. The operator asks the agent of the first one."""
GANGS, HANGS, QUICK_HANGS = (4, 64, 125), 10, 3
"""Pods of a gang that hangs, and how often one of them does."""
HANG_AFTER, PATIENCE_SECONDS = (2.0, 3.0), 60.0
"""At any moment between two rounds of the operator."""


@contextmanager
def simulated() -> Iterator[int]:
    """The port of the simulated agents, which end with the block."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)}
    command = [sys.executable, "-m", "benchmarks.simulated_agents"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=REPOSITORY, **pipes) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.stdin.close()


def a_job(number: int) -> dict[str, Any]:
    """As it is on a cluster."""
    return {
        "apiVersion": "disttrain.io/v1alpha1",
        "kind": "DistTrainingJob",
        "metadata": {"name": f"job-{number}", "namespace": "default", "uid": f"uid-{number}", "generation": 1},
        "spec": {"workers": {"replicas": PODS, "processesPerPod": 8}, "training": TRAINING},
    }


@dataclass
class Seen:
    """What was measured in some seconds in which agents were asked."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    ages: list[float] = field(default_factory=list)
    """Seconds between two answers of the same agent."""
    answers: float = 0.0
    failures: float = 0.0


async def ask_many(jobs: int, pods: int, port: int, rounds: int, per_second: float) -> Seen:
    """Ask the agents of so many jobs for so many rounds after the first one, which makes what later ones have."""
    world = world_of([a_job(number) for number in range(jobs)], pods)
    tokens = {f"uid-{number}": f"uid-{number}" for number in range(jobs)}
    answered: dict[str, list[float]] = {uid: [] for uid in tokens}
    rounds_done = [asyncio.Event() for _ in range(rounds + 1)]
    left = [jobs] * len(rounds_done)

    def wake(uid: str) -> None:
        times = answered[uid]
        if len(times) < len(left):
            left[len(times)] -= 1
            if left[len(times)] == 0:
                rounds_done[len(times)].set()
        times.append(time.monotonic())

    seen = Seen()
    async with polled(world, tokens, wake, asking(lambda agent: port), per_second) as agents:
        await rounds_done[0].wait()
        began, cpu, counts = time.monotonic(), time.process_time(), dict(agents.counts)
        await rounds_done[-1].wait()
        seen.seconds, seen.cpu_seconds = time.monotonic() - began, time.process_time() - cpu
        seen.answers = agents.counts["agent_answers"] - counts["agent_answers"]
        seen.failures = agents.counts["agent_failures"] + agents.counts["agent_answers_dropped"]
    for times in answered.values():
        seen.ages += [after - before for before, after in pairwise(times)]
    return seen


async def hang(pods: int, port: int) -> tuple[float, float, bool]:
    """Seconds from a hang of a gang of so many pods until a rank is named, CPU seconds of the operator meanwhile, and
    whether it is the right one."""
    job = a_job(0)
    job["spec"]["workers"]["replicas"] = pods
    began, known, named = time.monotonic() + random.uniform(*HANG_AFTER), asyncio.Event(), asyncio.Event()

    def wake(uid: str) -> None:
        live = agents.live(uid)
        if live is not None and live.suspicion is not None:
            named.set()
        known.set()

    ask_one_of = asking(lambda agent: port)

    async def ask(agent: Agent, token: str, path: str) -> bytes:
        return await ask_one_of(agent, HangingPod(token, agent.index, pods - 1, began).token, path)

    async with polled(world_of([job], pods), {"uid-0": "uid-0"}, wake, ask) as agents:
        await known.wait()
        await asyncio.sleep(began - time.monotonic())
        cpu = time.process_time()
        await asyncio.wait_for(named.wait(), PATIENCE_SECONDS)
        taken, spent = time.monotonic() - began, time.process_time() - cpu
        live = agents.live("uid-0")
        assert live is not None
        assert live.suspicion is not None
        return taken, spent, live.suspicion.blame.rank == pods * SIMULATED_RANKS - 1


def hangs(pods: int, times: int) -> Iterator[harness.Row]:
    """Rows for gangs of so many pods that hang one after the other."""
    with simulated() as port:
        found = [asyncio.run(hang(pods, port)) for _ in range(times)]
    seconds, cpu, right = zip(*found, strict=True)
    name = f"a gang of {pods} pods hangs"
    yield harness.row(f"{name}: named after", "s", seconds, [3 * PACE.median_seconds + 2])
    yield harness.Row(f"{name}: named after, longest", max(seconds), "s", 3 * PACE.median_seconds + 2, times)
    yield harness.row(f"{name}: CPU of the operator", "s", cpu)
    yield harness.Row(f"{name}: the right rank is named", sum(right), "of them", times, times)


def memory_mib() -> float:
    """Resident memory of this process."""
    return float(psutil.Process().memory_info().rss) / 2**20


def scale(jobs: int, pods: int, rounds: int, per_second: float = PER_SECOND) -> Iterator[harness.Row]:
    """Rows for so many jobs of so many pods each, all of which have an agent, and of which so many are asked a
    second."""
    with simulated() as port:
        before = memory_mib()
        seen = asyncio.run(ask_many(jobs, pods, port, rounds, per_second))
        name = f"{jobs * pods:,} agents of {jobs:,} jobs, {per_second:g} asked a second"
        yield harness.Row(f"{name}: CPU while they are asked", seen.cpu_seconds / seen.seconds, "cores")
        yield harness.Row(f"{name}: CPU per answer", 1000 * seen.cpu_seconds / seen.answers, "ms")
        yield harness.Row(f"{name}: resident memory, beside none", memory_mib(), "MiB", before)
        pace = max(INTERVAL_SECONDS, jobs / per_second)
        yield harness.row(f"{name}: age of figures", "s", seen.ages, [pace])
        p95 = statistics.quantiles(seen.ages, n=20, method="inclusive")[-1]
        yield harness.Row(f"{name}: age of figures, p95", p95, "s", pace, len(seen.ages))
        yield harness.Row(f"{name}: no or no right answer", seen.failures, "requests")


def beside_its_ranks(seconds: float) -> Iterator[harness.Row]:
    """An agent that is asked at the operator's pace."""
    spec = {"workers": {"replicas": 1, "processesPerPod": RANKS}, "training": TRAINING}
    with running(DISTTRAIN, spec) as job:
        job.until(lambda: job.log.read().step, "it trains")
        agent, ranks = job.agent(0), [job.rank(rank) for rank in range(RANKS)]
        asyncio.run(ask_one(LocalAgent.of(job), INTERVAL_SECONDS))
        step, before = job.log.read().step, [cpu_seconds(process) for process in (agent, *ranks)]
        asyncio.run(ask_one(LocalAgent.of(job), seconds))
        steps = job.log.read().step - step
        of_agent, *of_ranks = (
            1000 * (cpu_seconds(process) - former) / steps
            for process, former in zip((agent, *ranks), before, strict=True)
        )
        yield harness.Row("CPU of an agent for a step of its ranks", of_agent, "ms", sum(of_ranks), steps)
        yield harness.Row("CPU of an agent", of_agent * steps / 1000 / seconds, "cores")


async def ask_one(agent: LocalAgent, seconds: float) -> None:
    """Ask a local agent for so many seconds as the operator does."""
    world = world_of([agent.job])
    async with polled(world, {agent.uid: agent.token}, lambda _: None, asking(lambda _: agent.port)) as agents:
        await asyncio.sleep(seconds)
        if not agents.counts["agent_answers"]:
            raise SystemExit(f"the agent has not answered: {agents.counts}")


def cpu_seconds(process: psutil.Process) -> float:
    """What the threads of a process have run so far; /proc/PID/stat counts it by the hundredth of a second alone."""
    spent = 0
    for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with suppress(FileNotFoundError):
            spent += int(thread.read_text().split()[0])
    return spent / 1e9


def measure(quick: bool) -> Iterator[harness.Row]:
    yield from beside_its_ranks(15.0 if quick else 60.0)
    yield from scale(1_000, PODS, QUICK_ROUNDS if quick else ROUNDS)
    yield from scale(10_000, 1, QUICK_ROUNDS, MOST_PER_SECOND)
    if not quick:
        yield from scale(10_000, 1, QUICK_ROUNDS)
    for pods in GANGS:
        yield from hangs(pods, QUICK_HANGS if quick else HANGS)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("aiohttp", "torch"))
