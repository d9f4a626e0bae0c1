"""Ranks write the times of their steps where their agent looks for them: of each step, and of nothing between them."""

from array import array
from pathlib import Path
from typing import Any

import pytest

from disttrain_agent.step_clock import ACTIVITY, BETWEEN_STEPS, CHANGES, FIGURES, STEPS, step_times_file
from tests.unit.trainer.layouts import SHARD
from tests.unit.trainer.worlds import run_cases, small

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "fsdp2": {SHARD: 2},
    "local sgd": {"dataParallel": {"mode": "LocalSGD"}},
}
TRAINING = small(evaluation={"interval": 3}, logging={"interval": 100})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    runs = {name: [{"training": TRAINING, "parallelism": layout}] for name, layout in LAYOUTS.items()}
    assert [result["errors"] for result in run_cases(folder, 2, runs).values()] == [[None]] * 3
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_writes_the_times_of_its_steps_and_when_it_takes_none(folder: Path, name: str, rank: int) -> None:
    """Six steps, of which the first one counts for nothing, in two blocks with an evaluation after each.

    Red without: a change for each batch that is evaluated.
    """
    figures = array("d", step_times_file(folder / name / f"reports-{rank}", rank).read_bytes())
    assert len(figures) == FIGURES
    assert (figures[STEPS], figures[ACTIVITY]) == (5, BETWEEN_STEPS)
    starts, blocks, evaluations = 2, 2 * 2, 2 * 2
    batches = figures[CHANGES] - (6 + starts + blocks + evaluations)
    assert batches > 0
    assert batches % 2 == 0
    assert all(0 < seconds < 600 for seconds in figures[STEPS + 1 : STEPS + 6])
