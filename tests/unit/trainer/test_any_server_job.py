"""Whatever the rules allow of parameter servers trains: it ends, Sync equals one process, a stopped job goes on."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from disttrain_api.parallelism import CompressionName, PipelineSchedule, Synchronization
from tests.soak import SOAK
from tests.unit.trainer.any_job import (
    STOPPED_AFTER,
    Settings,
    allowed,
    alone,
    any_degrees,
    any_pipeline,
    any_training,
    compression,
    some,
)
from tests.unit.trainer.comparisons import require_same
from tests.unit.trainer.server_cases import run_server_cases
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases

pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

# Ranks, and how many of them are one worker.
WORLDS = [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)] if SOAK else [(2, 1), (4, 2)]
COUNT = 20 if SOAK else 3
SEED = random.randrange(1_000_000) if SOAK else 5


def draw(chance: random.Random, in_group: int) -> Settings:
    """A run of a case of `run_server_cases`."""
    synchronization = chance.choice([Synchronization.SYNC, *Synchronization])
    settings = {"synchronization": synchronization.value, **some(chance, 0.3, push=["Parameters"])}
    if synchronization is not Synchronization.SYNC:
        settings |= some(chance, 0.4, stalenessAwareRate=[True], snapshotInterval=[1, 2, 5])
    if synchronization is Synchronization.BOUNDED_STALENESS:
        settings |= some(chance, 0.5, staleness=[0, 1, 2])
    parallelism = any_degrees(chance, in_group)
    if "tensorParallelDegree" in parallelism:
        parallelism |= some(chance, 0.4, sequenceParallel=[True], vocabularyParallel=[True])
    if "pipelineParallelDegree" in parallelism:
        parallelism["pipeline"] = any_pipeline(chance, chance.choice(list(PipelineSchedule)))
    compressed = chance.random() < 0.3
    return {
        "training": any_training(chance),
        "parallelism": parallelism,
        "settings": settings,
        "dataParallel": {"compression": compression(chance, chance.choice(list(CompressionName)))}
        if compressed
        else {},
        "servers": chance.choice([1, 2, 3]),
    }


def any_server_jobs(seed: int, ranks: int, in_group: int, count: int) -> Iterator[Settings]:
    """So many that no rule refuses, the same ones for the same seed."""
    chance = random.Random(seed)
    groups = {"groupReduce": "WithinGroup"} if in_group > 1 else {}
    while count:
        run = draw(chance, in_group)
        servers = {"mode": "ParameterServer", "parameterServer": {**groups, **run["settings"]}, **run["dataParallel"]}
        if allowed(run["training"], run["parallelism"] | {"dataParallel": servers}, ranks, in_group):
            yield run
            count -= 1


def synchronous(run: Settings) -> bool:
    """Whether it computes what one process computes."""
    return not run["dataParallel"] and run["settings"] == {"synchronization": "Sync"}


JOBS = {(world, number): run for world in WORLDS for number, run in enumerate(any_server_jobs(SEED, *world, COUNT))}
NAMES = [f"{ranks} ranks, {in_group} in a group, job {number}" for (ranks, in_group), number in JOBS]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for world in WORLDS:
        own = {number: run for (place, number), run in JOBS.items() if place == world}
        cases = {f"whole {number}": [dict(run)] for number, run in own.items()}
        cases |= {f"stopped {number}": [{**run, "stop_after": STOPPED_AFTER}, dict(run)] for number, run in own.items()}
        ended = run_server_cases(tmp_path_factory.mktemp("world"), world[0], cases, world[1])
        found |= {(world, number): (ended[f"whole {number}"], ended[f"stopped {number}"]) for number in own}
    return found


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {str(place): [alone(run["training"])] for place, run in JOBS.items() if synchronous(run)}
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases)


@pytest.mark.parametrize("place", JOBS, ids=NAMES)
def test_it_ends_or_is_refused(results: dict[Any, Any], one_process: dict[str, Any], place: Any) -> None:
    for result in results[place]:
        last = [errors[-1] for errors in result["errors"]]
        if all(error is not None and error.startswith("InvalidConfiguration: ") for error in last):
            continue
        assert not any(last), JOBS[place]
        if str(place) in one_process:
            require_same(result["parameters"], one_process[str(place)]["parameters"], 1e-9)
        assert all(torch.isfinite(value).all() for value in result["parameters"].values()), JOBS[place]


def test_some_are_synchronous(one_process: dict[str, Any]) -> None:
    assert one_process
