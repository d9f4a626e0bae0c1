"""DDP searches each step for unused parameters only where there may be some."""

from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain_api.names import ExitCode
from tests.unit.trainer.layouts import ADAMW
from tests.unit.trainer.shard_code import of_shards
from tests.unit.trainer.worlds import job, run_cases, run_ranks, small

SEARCH = {"dataParallel": {"findUnusedParameters": True}}
STEPS = small(optimizer=ADAMW, steps=10, logging={"interval": 1})
SOME_UNUSED = {**STEPS, "model": of_shards("held", unused=True)}
ALL_USED = {**STEPS, "model": of_shards("held", unused=False)}
OTHER_ON_EACH_RANK = {**STEPS, "model": of_shards("choosing", how="another")}
LATER = {**STEPS, "model": of_shards("leaving_out")}
FROZEN = {**LATER, "steps": 5, "callbacks": [of_shards("Freezing")]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all used": (ALL_USED, {}),
    "all used, searched": (ALL_USED, SEARCH),
    "some unused": (SOME_UNUSED, {}),
    "another on each rank": (OTHER_ON_EACH_RANK, {}),
    "unused later": (LATER, {}),
    "unused later, searched": (LATER, SEARCH),
    "frozen at the start": (FROZEN, {}),
}
LEFT_OUT = (
    "InvalidConfiguration: `training.model`: a step left `second.weight`, `second.bias` without a gradient, where all "
    "parameters had one before the first step: set `parallelism.dataParallel.findUnusedParameters: true`, with which "
    "steps may use different parameters"
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {
        "all used": ALL_USED,
        "some unused": SOME_UNUSED,
        "unused later, searched": LATER,
        "frozen at the start": FROZEN,
    }
    runs = {name: [{"training": training}] for name, training in cases.items()}
    return run_cases(tmp_path_factory.mktemp("alone"), 1, runs)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    runs = {
        name: [{"training": training, "parallelism": parallelism}] for name, (training, parallelism) in CASES.items()
    }
    return run_cases(tmp_path_factory.mktemp("two"), 2, runs)


@pytest.mark.parametrize(
    ("case", "searches"),
    {
        "all used": False,
        "all used, searched": True,
        "some unused": True,
        "another on each rank": True,
        "unused later, searched": True,
        "frozen at the start": True,
    }.items(),
)
def test_ddp_searches_where_one_may_be_unused(two: dict[str, dict[str, Any]], case: str, searches: bool) -> None:
    assert two[case]["errors"] == [None]
    assert two[case]["searches"] is searches


@pytest.mark.parametrize("case", ["all used", "some unused", "unused later, searched", "frozen at the start"])
def test_both_train_as_one_process(alone: dict[str, dict[str, Any]], two: dict[str, dict[str, Any]], case: str) -> None:
    for name, value in alone[case]["parameters"].items():
        torch.testing.assert_close(two[case]["parameters"][name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_a_parameter_that_is_left_out_later_is_named(two: dict[str, dict[str, Any]]) -> None:
    assert two["unused later"]["errors"] == [LEFT_OUT]


def test_one_rank_that_leaves_it_out_ends_with_its_name(tmp_path: Path) -> None:
    """The others wait for its gradient, until it is gone."""
    training = {**STEPS, "model": of_shards("leaving_out", rank=1)}
    ended = run_ranks(tmp_path, job(training), 2)
    assert ended[1].code == ExitCode.INVALID_CONFIGURATION, ended[1].err
    assert LEFT_OUT in ended[1].err
    assert ended[0].code == ExitCode.PEER_LOST, ended[0].err
