"""From the POST of jobs to the last of their pods created, as somebody who watches pods sees it.

The floor, measured in the same run and in turn: the same pods, serialised beforehand, POSTed directly by the same
client with as many requests in flight. So the ratio is what the operator adds: noticing the job, deciding, writing the
attempt into its status before anything is made, Service and Secret, building the pods, and its own share of the CPU.
For many jobs at once a second row has the same requests sent without an operator: what they cost by themselves.

A real etcd, kube-apiserver, scheduler and controller-manager; the nodes are kwok's. All of it runs on this one machine,
so the API server, which does most of the work, is disturbed by whatever the operator spends.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "operator")]

from benchmarks import harness
from benchmarks.operator_world import World, world
from benchmarks.requests_alone import requests_alone


@dataclass(frozen=True)
class Case:
    """So many jobs of so many pods at once."""

    jobs: int
    replicas: int
    repeats: int

    def named(self, prefix: str) -> list[tuple[str, int]]:
        return [(f"{prefix}-{number}", self.replicas) for number in range(self.jobs)]

    def __str__(self) -> str:
        what = "job" if self.jobs == 1 else f"{self.jobs} jobs"
        return f"{what} of {self.replicas} pods"


CASES = (Case(1, 8, 7), Case(1, 64, 7), Case(1, 200, 7), Case(1, 1000, 3), Case(100, 8, 3))
QUICK = (Case(1, 8, 3), Case(1, 64, 3), Case(20, 8, 3))


def measured(case: Case, there: World) -> Iterator[harness.Row]:
    """Floor and values in turn."""
    floors: list[float] = []
    values: list[float] = []
    alone: list[float] = []
    kinds = [(there.floor, floors), (there.ours, values)]
    if case.jobs > 1:
        kinds.append((partial(requests_alone, there), alone))
    for repeat in range(case.repeats):
        for what, into in kinds:
            into.append(there.run(what(case.named(f"job-{repeat}"))))
            there.run(there.clear())
    yield harness.row(f"{case}: POST to all created", "s", values, floors)
    if alone:
        yield harness.row(f"{case}: the same requests alone", "s", alone, floors)


def measure(quick: bool) -> Iterator[harness.Row]:
    with world() as there:
        # The first round warms connections and caches on both sides.
        list(measured(Case(1, 64, 1), there))
        for case in QUICK if quick else CASES:
            yield from measured(case, there)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("kopf", "aiohttp", "orjson"))
