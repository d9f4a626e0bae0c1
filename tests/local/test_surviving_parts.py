"""Ranks that hold parts of a model in two pods, through `disttrain run`: the parts that survive are gone on from."""

from pathlib import Path
from typing import Any

import pytest

from tests.chaos import agent_of

from .conftest import Run, Workplace
from .test_restarts_in_place import INTERVAL, checkpoint_in_status, ends_as_undisturbed, is_held, job

REPLICATE = "dataParallelReplicateDegree"
HYBRID = {REPLICATE: 2, "dataParallelShardDegree": 2}
TENSORS = {REPLICATE: 2, "tensorParallelDegree": 2}
# So that a step has as many samples as in the others.
STAGES = {REPLICATE: 2, "pipelineParallelDegree": 2, "pipeline": {"schedule": "GPipe", "microbatches": 1}}


def released(workplace: Workplace) -> Path:
    return workplace.folder / "released"


def held(workplace: Workplace, parallelism: dict[str, Any]) -> Run:
    run = workplace.start(job(workplace, released(workplace), 2, ranks=4, **parallelism))
    run.until(lambda: is_held(run), "it waits behind its second checkpoint")
    return run


@pytest.mark.parametrize(
    ("parallelism", "victim", "survivors"),
    [
        # The first pod has a part that the second one has, too; both ranks of a stage are in one pod.
        (HYBRID, 1, [{0, 3}]),
        (TENSORS, 2, [{0, 1}]),
        (STAGES, 3, [{0, 2}, {1, 2}]),
    ],
    ids=["shards", "tensors", "stages"],
)
def test_a_killed_rank_has_its_part_from_another_and_the_curve_is_that_of_a_run_without_the_kill(
    workplace: Workplace, parallelism: dict[str, Any], victim: int, survivors: list[set[int]]
) -> None:
    run = held(workplace, parallelism)
    run.find(f"rank {victim}").kill()
    ends_as_undisturbed(workplace, run, released(workplace), pods=2, survivors=survivors, ranks=4, **parallelism)
    assert not run.left()


@pytest.mark.parametrize(
    ("parallelism", "survivors"), [(HYBRID, [{0, 1}]), (STAGES, None)], ids=["a replica", "a stage"]
)
def test_a_lost_pod_has_the_parts_of_another_or_where_it_alone_had_one_all_begin_with_the_checkpoint(
    workplace: Workplace, parallelism: dict[str, Any], survivors: list[set[int]] | None
) -> None:
    run = held(workplace, parallelism)
    run.until(lambda: checkpoint_in_status(run) == 2 * INTERVAL, "the status has that checkpoint")
    agent_of(run.find("rank 2")).kill()
    ends_as_undisturbed(
        workplace, run, released(workplace), pods=2, restarts=1, survivors=survivors, ranks=4, **parallelism
    )
    log = run.log(0, attempt=1)
    assert "[agent] restart 1 in place: rank 2 was lost with its pod" in log
    assert ("no rank has left the part at pipeline 1" in log) is (survivors is None)
    assert not run.left()
