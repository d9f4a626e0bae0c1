"""Real ranks of which one takes its time: it is named by what it does itself, and not by what all wait for."""

from typing import Any

import pytest

from tests.unit.trainer.layouts import SHARD
from tests.unit.trainer.worlds import run_cases, small

CODE = "tests.unit.trainer.slow_rank_code"
ALIKE, SLOW = {"seconds": 0.01, "of_rank_1": 0.01}, {"seconds": 0.01, "of_rank_1": 0.014}
TIMED = {"steps": 25, "logging": {"interval": 5}, "globalBatchSize": 4}
OWN = {"time_metrics/own_median(s)", "time_metrics/own_max(s)"}


def model(**seconds: float) -> dict[str, Any]:
    return small(model={"entrypoint": f"{CODE}:working_model", "config": seconds}, **TIMED)


def data(**seconds: float) -> dict[str, Any]:
    return small(data={"entrypoint": f"{CODE}:working_samples", "config": seconds}, **TIMED)


PIPELINE, LOCAL = {"pipelineParallelDegree": 2}, {"dataParallel": {"mode": "LocalSGD"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "slow passes": (model(**SLOW), {}, 1),
    "slow passes of several microbatches": (model(**SLOW) | {"gradientAccumulationSteps": 2}, {}, 1),
    "slow samples": (data(**SLOW), {}, 1),
    "slow samples of shards": (data(**SLOW), {SHARD: 2}, 1),
    "slow samples of replicas that train alone": (data(**SLOW), LOCAL, 1),
    "slow passes of such replicas": (model(**SLOW), LOCAL, 1),
    "passes alike": (model(**ALIKE), {}, None),
    "samples alike": (data(**ALIKE), {}, None),
    "less than the factor": (model(seconds=0.01, of_rank_1=0.0125), {}, None),
    "shards, which wait in their passes": (model(**SLOW), {SHARD: 2}, None),
    "stages that differ": (model(**SLOW), PIPELINE, None),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    runs = {name: [{"training": training, "parallelism": cut}] for name, (training, cut, _) in CASES.items()}
    return run_cases(tmp_path_factory.mktemp("world"), 2, runs, module="tests.unit.trainer.slow_rank_cases")


@pytest.mark.parametrize("name", CASES)
def test_the_slow_rank_is_reported(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["errors"] == [None]
    slow = results[name]["report"].slow_rank
    assert (None if slow is None else slow.rank) == CASES[name][2]
    assert all(line.keys() >= OWN for line in results[name]["metrics"] if "lr" in line)
