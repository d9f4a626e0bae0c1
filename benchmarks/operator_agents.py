"""What the whole operator costs beside 10,000 agents: its CPU, its memory, and how old the statuses of jobs are.

`disttrain-operator` as a process, with the gate, a lease and its own limits, beside an API server and agents that are
simulated in another process (simulated_cluster.py), which is not counted. That takes the operator's requests over HTTP;
its answers and events are those of an API server. All jobs train, ten steps a second, in 100 namespaces on 100 nodes.
The operator's metrics are read each 15 s. CPU is that of its process, by /proc, once each job's status has a step.

The age of a status is the time since the step was done that it shows, of all jobs, once a second; where the operator is
in time it is hardly more than the pace. 10,000 jobs of one pod are asked at ten times the usual rate, with which their
statuses could be as new: more than an operator can do.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PATHS = [str(REPOSITORY), *(str(REPOSITORY / package) for package in ("api", "operator"))]
sys.path[:0] = PATHS

from benchmarks import harness
from benchmarks.local_agents import INTERVAL_SECONDS, PER_SECOND
from benchmarks.operator_world import OperatorUnderTest, StuckError
from tools.cluster.processes import dying_with_parent

MOST_CORES, MOST_MIB = 0.5, 600.0
SCRAPE_SECONDS = 15.0
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Size:
    """Jobs that run, and how many of them are asked a second."""

    jobs: int
    pods: int
    per_second: float = PER_SECOND
    all_shown: bool = True
    """Whether to begin when each job's status shows a step: a tenth of them do where the operator is too slow."""


SIZES = (Size(1_000, 10), Size(100, 100), Size(10_000, 1, 1_000.0, all_shown=False))


class Simulated:
    """The simulated cluster, at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def figures(self) -> dict[str, Any]:
        """What was written and seen since the last call."""
        with urllib.request.urlopen(f"{self.url}/figures", timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def simulated(size: Size, key: Path) -> Iterator[Simulated]:
    """A cluster that ends with the block."""
    command = [sys.executable, "-m", "benchmarks.simulated_cluster", str(size.jobs), str(size.pods), str(key)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(dying_with_parent(command), env=environment, cwd=REPOSITORY, **pipes) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield Simulated(server.stdout.readline().strip())
        finally:
            server.stdin.close()


@contextmanager
def operator(size: Size, at: Simulated, folder: Path, key: Path) -> Iterator[OperatorUnderTest]:
    """An operator that serves this cluster, and ends with the block."""
    kubeconfig = folder / "kubeconfig"
    access = {
        "current-context": "simulated",
        "contexts": [{"name": "simulated", "context": {"cluster": "simulated", "user": "nobody"}}],
        "clusters": [{"name": "simulated", "cluster": {"server": at.url}}],
        "users": [{"name": "nobody", "user": {}}],
    }
    kubeconfig.write_text(json.dumps(access))
    flags = ["--gang-gate", "--leader-elect", "--agent-access=PodIP", f"--token-key-file={key}"]
    # A machine that is busy must not cost the lease: what follows from that is another measurement.
    flags.append("--lease-duration-seconds=15")
    flags += [f"--progress-interval-seconds={INTERVAL_SECONDS}", f"--progress-per-second={size.per_second}"]
    made = OperatorUnderTest(kubeconfig, folder, *flags, ready_seconds=PATIENCE_SECONDS)
    try:
        yield made
    finally:
        made.stop()


def wait_for_first(size: Size, at: Simulated, tested: OperatorUnderTest) -> None:
    """Until all that the operator does once is done: each job has been written."""
    written, deadline = 0, time.monotonic() + PATIENCE_SECONDS
    wanted = size.jobs if size.all_shown else size.jobs // 10
    while written < wanted:
        if time.monotonic() > deadline or not tested.alive():
            raise StuckError(f"{written} of {wanted} statuses were written: {tested.state()}")
        time.sleep(0.5)
        written += at.figures()["writes"]


def scale(size: Size, seconds: float) -> Iterator[harness.Row]:
    """Rows for an operator beside so many agents."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = folder / "key"
        key.write_text("0" * 64)
        with simulated(size, key) as at, operator(size, at, folder, key) as tested:
            wait_for_first(size, at, tested)
            cpu, began = tested.cpu_seconds(), time.monotonic()
            at.figures()
            while (left := began + seconds - time.monotonic()) > 0:
                time.sleep(min(left, SCRAPE_SECONDS))
                tested.requests()
            taken, spent, found = time.monotonic() - began, tested.cpu_seconds() - cpu, at.figures()
            yield from rows(size, found, spent / taken, spent, tested.memory_mib("VmHWM"))


def rows(size: Size, found: dict[str, Any], cores: float, spent: float, memory: float) -> Iterator[harness.Row]:
    """The rows of what was found."""
    name = f"{size.jobs * size.pods:,} agents, {size.jobs:,} x {size.pods} pods"
    yield harness.Row(f"{name}: CPU", cores, "cores", MOST_CORES)
    yield harness.Row(f"{name}: highest resident memory", memory, "MiB", MOST_MIB)
    ages: Sequence[float] = sorted(found["ages"])
    yield harness.row(f"{name}: age of a status", "s", ages, [INTERVAL_SECONDS])
    p95 = statistics.quantiles(ages, n=20, method="inclusive")[-1]
    yield harness.Row(f"{name}: age of a status, p95", p95, "s", INTERVAL_SECONDS, len(ages))
    yield harness.Row(f"{name}: age of a status, largest", ages[-1], "s", INTERVAL_SECONDS, len(ages))
    if found["delays"]:
        yield harness.row(f"{name}: from an answer to its write", "s", found["delays"])
    yield harness.Row(f"{name}: answers of agents", found["answers"], "answers")
    yield harness.Row(f"{name}: writes of statuses", found["writes"], "writes")
    yield harness.Row(f"{name}: CPU per answer", 1000 * spent / max(found["answers"], 1), "ms")
    yield harness.Row(f"{name}: CPU per write", 1000 * spent / max(found["writes"], 1), "ms")
    yield harness.Row(f"{name}: writes refused as stale", found["conflicts"], "writes", None)


def measure(quick: bool) -> Iterator[harness.Row]:
    for size in SIZES:
        yield from scale(size, 20.0 if quick else 60.0)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("kopf", "aiohttp", "orjson", "pydantic"))
