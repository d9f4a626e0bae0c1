"""`training.skipSteps` with parameter servers: each worker's part of a step is judged by itself, and counts or does
not."""

from pathlib import Path
from typing import Any

import pytest

from disttrain_api.names import ExitCode
from tests.unit.trainer.comparisons import require_same, require_same_bits, series
from tests.unit.trainer.server_cases import run_server_cases
from tests.unit.trainer.server_jobs import a_job, ended
from tests.unit.trainer.worlds import run_cases, small, user

CODE = "tests.unit.trainer.loading_code"
STEPS, SPOILT = 8, 4
ASYNC = {"synchronization": "Async"}
SGD: dict[str, Any] = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9}
# Settings of the servers, optimizer, and what stands beside the servers.
ONE_WORKER: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "in step": ({}, SGD, {}),
    "async": (ASYNC, {"name": "AdamW", "learningRate": 0.01}, {}),
    "changes": ({"push": "Parameters"}, SGD, {}),
    "OneBit": (ASYNC, SGD, {"compression": {"name": "OneBit"}}),
    "TopK": ({}, SGD, {"compression": {"name": "TopK", "ratio": 0.1}}),
}
# Inputs of step 9 that are far out.
SPIKE: dict[str, Any] = {
    "model": user("double_mlp", depth=0),
    "steps": 10,
    "skipSteps": {"lossDeviations": 6, "window": 8},
}
ROLL_BACK = {"mostInRow": 1, "onMostInRow": "RollBack"}


def training(data: str, optimizer: dict[str, Any] = SGD, **config: Any) -> dict[str, Any]:
    described = {"entrypoint": f"{CODE}:{data}", "config": config}
    # The log's only line: results may come after the last evaluation has begun.
    return small(data=described, optimizer=optimizer, skipSteps={}, steps=STEPS, logging={"interval": 1})


def spoilt(optimizer: dict[str, Any] = SGD, first: int = SPOILT, last: int = SPOILT) -> dict[str, Any]:
    return training("spoilt_steps", optimizer, first=first, last=last)


def without(optimizer: dict[str, Any] = SGD, first: int = SPOILT, last: int = SPOILT) -> dict[str, Any]:
    """As if these steps had never had samples."""
    count = last - first + 1
    passed = training("spoilt_steps", optimizer, first=first, last=last, passed_over=(first - 1, count))
    return passed | {"steps": STEPS - count}


def spike() -> dict[str, Any]:
    adam = {"name": "AdamW", "learningRate": 0.001}
    return training("spoilt_steps", adam, first=9, last=9, factor=30) | SPIKE


def rolled_back(case: dict[str, Any]) -> dict[str, Any]:
    return case | {"skipSteps": ROLL_BACK, "checkpoint": {"interval": 3, "asynchronous": False}}


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {}
    for name, (settings, optimizer, beside) in ONE_WORKER.items():
        run = {"settings": settings, "dataParallel": beside, "servers": 2}
        cases[name] = [run | {"training": spoilt(optimizer)}]
        cases[f"{name}, without"] = [run | {"training": without(optimizer)}]
    stopped = {"training": spoilt(), "stop_after": SPOILT + 1}
    cases["resumed"] = [stopped, {"training": spoilt()}]
    cases["too many"] = [{"training": training("spoilt_samples", factor="nan", of_all=True) | {"skipSteps": {}}}]
    cases["too many"][0]["training"]["skipSteps"] = {"mostInRow": 3}
    cases["spike"] = [{"training": spike()}]
    case = spoilt(first=5, last=6)
    # Steps 5 and 6 fail, and the last checkpoint before them is that of step 3.
    cases["rolled back"] = [{"training": rolled_back(case | {"steps": 7})} for _ in range(2)]
    data = {"first": 5, "last": 6, "passed_over": (3, 3)}
    cases["rolled back, without"] = [{"training": rolled_back(training("spoilt_steps", **data) | {"steps": 7})}]
    return run_server_cases(tmp_path_factory.mktemp("worker"), 1, cases)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    half = training("spoilt_half", step=SPOILT)
    cases = {
        "half": [{"training": half, "servers": 2}],
        "half, async": [{"training": half, "settings": ASYNC}],
        "half, changes": [{"training": half, "settings": {"push": "Parameters"}}],
        "all": [{"training": spoilt()}],
    }
    return run_server_cases(tmp_path_factory.mktemp("workers"), 2, cases)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    copied = training("spoilt_half", step=SPOILT, copied=True)
    cases = {"copied": [{"training": copied}], "spoilt": [{"training": spoilt()}], "without": [{"training": without()}]}
    cases["spike"] = [{"training": spike()}]
    return run_cases(tmp_path_factory.mktemp("one"), 1, cases)


def counts(result: dict[str, Any]) -> list[float]:
    return series(result, "skipped_steps")


@pytest.mark.parametrize("name", ONE_WORKER)
def test_a_part_that_is_skipped_leaves_nothing_behind(one_worker: dict[str, Any], name: str) -> None:
    found, expected = one_worker[name], one_worker[f"{name}, without"]
    assert found["errors"] == expected["errors"] == [[None]]
    require_same_bits(found["parameters"], expected["parameters"])
    assert counts(found)[-1] == 1
    assert counts(expected)[-1] == 0


def test_a_group_of_ranks_skips_as_one_worker(tmp_path: Path, one_process: dict[str, Any]) -> None:
    groups = {"in step": {}, "async": ASYNC}
    cases = {name: [{"training": spoilt(), "settings": settings}] for name, settings in groups.items()}
    for found in run_server_cases(tmp_path, 2, cases, ranks_per_pod=2).values():
        assert found["errors"] == [[None], [None]]
        assert counts(found)[-1] == 1
        require_same(found["parameters"], one_process["without"]["parameters"])


@pytest.mark.parametrize("name", ["half", "half, changes"])
def test_a_step_is_that_of_the_parts_that_are_used(
    two_workers: dict[str, Any], one_process: dict[str, Any], name: str
) -> None:
    assert two_workers[name]["errors"] == [[None], [None]]
    assert counts(two_workers[name])[-1] == 1
    require_same(two_workers[name]["parameters"], one_process["copied"]["parameters"])
    losses = [series(result)[SPOILT - 1] for result in (two_workers[name], one_process["copied"])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_a_step_without_a_part_that_is_used_makes_no_update(
    two_workers: dict[str, Any], one_process: dict[str, Any]
) -> None:
    assert two_workers["all"]["errors"] == [[None], [None]]
    assert counts(two_workers["all"])[-1] == 2
    assert [step for step, loss in enumerate(series(two_workers["all"]), 1) if loss is None] == [SPOILT]
    require_same(two_workers["all"]["parameters"], one_process["spoilt"]["parameters"])


def test_workers_that_wait_for_nobody_skip_as_well(two_workers: dict[str, Any]) -> None:
    assert two_workers["half, async"]["errors"] == [[None], [None]]
    assert counts(two_workers["half, async"])[-1] == 1


def test_what_is_too_large_is_learned_as_by_one_process(
    one_worker: dict[str, Any], one_process: dict[str, Any]
) -> None:
    assert one_worker["spike"]["errors"] == [[None]]
    assert [counts(result)[-1] for result in (one_worker["spike"], one_process["spike"])] == [1, 1]
    require_same(one_worker["spike"]["parameters"], one_process["spike"]["parameters"])


def test_what_was_skipped_before_a_stop_stays_counted(one_worker: dict[str, Any]) -> None:
    assert one_worker["resumed"]["errors"][0][1] is None
    assert counts(one_worker["resumed"])[-1] == 1
    require_same_bits(one_worker["resumed"]["parameters"], one_worker["in step"]["parameters"])


def test_too_many_in_a_row_end_the_job(one_worker: dict[str, Any]) -> None:
    [[error]] = one_worker["too many"]["errors"]
    assert error == (
        "NonFiniteLoss: 4 parts in a row have a gradient that is not used, the last of them one of step 4: those of "
        "worker 0, whose log says why; lower `training.optimizer.learningRate`, look at the data of these steps, or "
        "raise `training.skipSteps.mostInRow`"
    )


def test_a_roll_back_trains_as_if_the_samples_were_not_there(one_worker: dict[str, Any]) -> None:
    [[first, second]] = one_worker["rolled back"]["errors"]
    assert first.startswith("NonFiniteLoss: 2 parts in a row have a gradient that is not used, the last of them one of")
    assert second is None
    require_same_bits(one_worker["rolled back"]["parameters"], one_worker["rolled back, without"]["parameters"])


def test_the_worker_that_cannot_go_on_is_named(tmp_path: Path) -> None:
    """All of its own parts are skipped, and those of the other one are used."""
    case = training("spoilt_on", rank=1) | {"skipSteps": {"mostInRow": 2}, "steps": 1000}
    with a_job(tmp_path, case) as job:
        code, report = ended(job.workers[0], 0)
        assert code == ExitCode.NON_FINITE_LOSS
        assert "3 parts in a row have a gradient that is not used" in report.error.message
        assert "those of worker 1, whose log says why" in report.error.message
