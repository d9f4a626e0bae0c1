"""`training.skipSteps` with PipeDream and PipeDream-2BW: the last stage judges a step by its loss before any stage has
made an update of it."""

import math
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch

from disttrain_trainer.roll_back import MARK_FILE
from tests.unit.trainer.comparisons import require_same, require_same_bits, series
from tests.unit.trainer.delayed import DEPTH, LAYERS, MLP, Task, pipedream, simulate, synced, two_buffers
from tests.unit.trainer.loading_code import spoilt_samples
from tests.unit.trainer.worlds import run_cases, small, user

CODE = "tests.unit.trainer.loading_code"
TOLERANCE = 1e-10
STEPS, MICRO, WINDOW, DEVIATIONS = 30, 4, 8, 0.5
WEIGHTS = {
    "PipeDream": (pipedream, {"schedule": "PipeDream"}),
    "vertical sync": (synced, {"schedule": "PipeDream", "verticalSync": True}),
    "2BW": (two_buffers, {"schedule": "PipeDream2BW"}),
}
# Ranks, stages, changes of the training, options of the simulation.
NOT_FINITE: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "": (3, 3, {}, {}),
    ", accumulated": (3, 3, {"gradientAccumulationSteps": 2}, {"per_update": 2}),
    ", two replicas": (4, 2, {}, {"replicas": 2}),
}
SPOILT = {"data": {"entrypoint": f"{CODE}:spoilt_samples", "config": {"factor": "nan"}}, "skipSteps": {}}
STRAY = {"skipSteps": {"lossDeviations": DEVIATIONS, "window": WINDOW, "mostInRow": 100}}
SPOILT_STEPS = {"first": 5, "last": 6}


def piped(weights: str, stages: int) -> dict[str, Any]:
    pipeline = {**WEIGHTS[weights][1], "layersPerStage": LAYERS[stages]}
    return {"pipelineParallelDegree": stages, "pipeline": pipeline}


def training(**changes: Any) -> dict[str, Any]:
    sizes = {"steps": STEPS, "microBatchSize": MICRO, "globalBatchSize": None, "logging": {"interval": 1}}
    optimizer = {"name": "SGD", "learningRate": 0.05, "momentum": 0.9}
    return small(**{"model": user("double_mlp", depth=DEPTH), "optimizer": optimizer} | sizes | changes)


def rolled_back(weights: str, on_most: str = "RollBack", **config: Any) -> dict[str, Any]:
    """Steps 5 and 6 fail, and the last checkpoint before them is that of step 3."""
    return training(
        data={"entrypoint": f"{CODE}:spoilt_steps", "config": SPOILT_STEPS | config},
        microBatchSize=12 if weights == "2BW" else 24,
        skipSteps={"mostInRow": 1, "onMostInRow": on_most},
        steps=7,
        checkpoint={"interval": 3, "asynchronous": False},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flushless")


@pytest.fixture(scope="module")
def worlds(folder: Path) -> dict[str, dict[str, Any]]:
    cases: dict[int, dict[str, Any]] = {2: {}, 3: {}, 4: {}}
    for weights in WEIGHTS:
        for name, (ranks, stages, changes, _) in NOT_FINITE.items():
            run = {"training": training(**SPOILT, **changes), "parallelism": piped(weights, stages)}
            cases[ranks][f"{weights}{name}"] = [run]
        two = piped(weights, 2)
        kept = {"checkpoint": {"interval": 16}}
        runs = [{"training": training(**STRAY, **kept, steps=steps), "parallelism": two} for steps in (16, STEPS)]
        cases[2] |= {f"{weights}, stray": runs[1:], f"{weights}, stray, resumed": runs}
        cases[2][f"{weights}, rolled back"] = [{"training": rolled_back(weights), "parallelism": two}] * 2
        without = {"training": rolled_back(weights, passed_over=(3, 3)), "parallelism": two}
        cases[2][f"{weights}, rolled back, without"] = [without]
    far = {"data": {"entrypoint": f"{CODE}:spoilt_samples", "config": {"factor": 1e4}}, "skipSteps": {}}
    model = {"entrypoint": f"{CODE}:spoiling_layers"}
    pipeline = {"schedule": "PipeDream", "layersPerStage": [1, 1, 2]}
    spoiling = {"pipelineParallelDegree": 3, "pipeline": pipeline}
    cases[3]["spoiling"] = [{"training": training(model=model, steps=13, **far), "parallelism": spoiling}]
    cases[2]["Fail"] = [{"training": rolled_back("PipeDream", "Fail"), "parallelism": piped("PipeDream", 2)}] * 2
    found = {}
    for ranks, own in cases.items():
        found |= run_cases(folder / f"of-{ranks}", ranks, own)
    return found


def counts(result: dict[str, Any]) -> list[float]:
    return series(result, "skipped_steps")


def is_usual(before: list[float], loss: float) -> bool:
    last = before[-WINDOW:]
    return len(last) < WINDOW or loss <= fmean(last) + DEVIATIONS * pstdev(last)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", NOT_FINITE)
def test_no_stage_updates_where_the_loss_is_not_finite(
    worlds: dict[str, dict[str, Any]], weights: str, name: str
) -> None:
    found, (_, stages, _, options) = worlds[f"{weights}{name}"], NOT_FINITE[name]
    version = WEIGHTS[weights][0]
    if weights == "2BW":
        options = {**options, "per_update": options.get("per_update", 1) * stages}
    task = Task(MLP.model, lambda: spoilt_samples("nan"), MLP.stages)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    expected = simulate(
        version, stages, sgd, STEPS, micro=MICRO, task=task, is_used=lambda _, loss: math.isfinite(loss), **options
    )
    assert found["errors"] == [None]
    assert counts(found)[-1] == len(expected.skipped) > 1
    require_same(found["parameters"], expected.parameters)
    assert [step for step, loss in enumerate(series(found), 1) if loss is None] == expected.skipped


@pytest.mark.parametrize("weights", WEIGHTS)
def test_no_stage_updates_where_the_loss_is_too_large(worlds: dict[str, dict[str, Any]], weights: str) -> None:
    found = worlds[f"{weights}, stray"]
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    per_update = 2 if weights == "2BW" else 1
    expected = simulate(
        WEIGHTS[weights][0], 2, sgd, STEPS, micro=MICRO, per_update=per_update, drained=(16,), is_used=is_usual
    )
    assert found["errors"] == [None]
    assert counts(found)[-1] == len(expected.skipped) > 1
    require_same(found["parameters"], expected.parameters)
    assert series(found) == pytest.approx(expected.losses, rel=TOLERANCE)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_resumed_run_judges_as_one_that_never_ended(worlds: dict[str, dict[str, Any]], weights: str) -> None:
    found, expected = worlds[f"{weights}, stray, resumed"], worlds[f"{weights}, stray"]
    assert found["errors"] == [None, None]
    assert counts(found) == counts(expected)
    require_same_bits(found["parameters"], expected["parameters"])


def test_a_stage_whose_gradient_is_not_finite_makes_no_update_nor_do_those_before_it(
    worlds: dict[str, dict[str, Any]],
) -> None:
    """With 50 samples, of which one spoils the gradient of the second stage, an epoch has 13 steps."""
    found = worlds["spoiling"]
    assert found["errors"] == [None]
    assert counts(found)[-1] == 1
    assert all(bool(value.isfinite().all()) for value in found["parameters"].values())


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_roll_back_trains_as_if_the_samples_were_not_there(worlds: dict[str, dict[str, Any]], weights: str) -> None:
    first, second = worlds[f"{weights}, rolled back"]["errors"]
    assert first.startswith("NonFiniteLoss: 2 steps in a row have a gradient that is not used, the last of them step 6")
    assert second is None
    expected = worlds[f"{weights}, rolled back, without"]
    assert expected["errors"] == [None]
    require_same_bits(worlds[f"{weights}, rolled back"]["parameters"], expected["parameters"])


def test_without_it_the_next_attempt_fails_at_the_same_step(worlds: dict[str, dict[str, Any]], folder: Path) -> None:
    first, second = worlds["Fail"]["errors"]
    assert first == second
    assert "whose loss is nan; lower `training.optimizer.learningRate`" in first
    assert not (folder / "of-2" / "Fail" / "test" / MARK_FILE).exists()
