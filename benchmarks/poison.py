"""How long a tenant's job takes to run beside a tenant who stores everything of the poison corpus.

The corpus is tests/integration/poison_corpus.py: specs, statuses, pods, children and last words of pods, made to
stop an operator. The gate is on. The reference is the same job, measured in the same run before there was any of it.
Beside it the same number of pods POSTed directly: how busy the machine is with other things.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "operator")]

from benchmarks import harness
from benchmarks.operator_world import world
from tests.integration import poison_corpus
from tests.integration.mallory import Mallory

PODS = 8
GATE = {"gangScheduler": "Gate"}


def measure(quick: bool) -> Iterator[harness.Row]:
    repeats = 5 if quick else 15
    with world("--gang-gate") as there:
        there.measured("first", PODS, 1, schedulingPolicy=GATE)
        alone, direct_alone = there.measured("alone", PODS, repeats, schedulingPolicy=GATE)
        memory, cpu = there.operator.memory_mib(), there.operator.cpu_seconds()
        stored = store(Mallory(there.control_plane.api))
        yield harness.Row("objects of the corpus", stored, "")
        yield harness.Row("operator's CPU while they are made", there.operator.cpu_seconds() - cpu, "s")
        beside, direct_beside = there.measured("beside", PODS, repeats, schedulingPolicy=GATE)
        yield harness.row(f"job of {PODS} pods: POST to running beside it", "s", beside, alone)
        yield harness.row(f"{PODS} pods POSTed directly then", "s", direct_beside, direct_alone)
        yield harness.Row("resident memory", there.operator.memory_mib(), "MiB", memory)
        yield harness.Row("highest resident memory", there.operator.memory_mib("VmHWM"), "MiB")


def store(mallory: Mallory) -> int:
    """Store all of the corpus. Returns the number of objects."""
    mallory.store_jobs()
    policy = {"schedulingPolicy": GATE, "cleanPodPolicy": "All"}
    mallory.store_children(mallory.team.create(poison_corpus.OWN, runPolicy=policy))
    mallory.report(list(poison_corpus.reports()))
    return len(set(mallory.stored))


if __name__ == "__main__":
    harness.main(__doc__, measure, ("kopf", "aiohttp", "orjson"))
