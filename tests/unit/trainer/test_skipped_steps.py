"""`training.skipSteps`: no update is made of a loss or gradient that is not finite, or far too large; in every layout
alike."""

import math
from itertools import pairwise
from typing import Any

import pytest

from disttrain_api.training import SkipSteps
from disttrain_trainer.optim.step_guard import StepGuard
from disttrain_trainer.runtime.errors import NonFiniteLoss
from tests.unit.trainer.comparisons import require_same, require_same_bits, series
from tests.unit.trainer.layouts import CONTEXT, PIPELINE, SHARD, TENSOR
from tests.unit.trainer.worlds import run_cases, small, user

WINDOW, STEPS = 8, 20


def spoilt(**config: Any) -> dict[str, Any]:
    return {"entrypoint": "tests.unit.trainer.loading_code:spoilt_samples", "config": config}


NOT_FINITE = small(data=spoilt(factor="nan"), skipSteps={}, steps=STEPS, logging={"interval": 1})
TOO_LARGE = {
    **NOT_FINITE,
    # An epoch's last batch has two samples, whose gradient is three times that of the others.
    "model": user("double_mlp", depth=0),
    "data": user("double_samples"),
    "skipSteps": {"aboveMedian": 2, "window": WINDOW},
    "optimizer": {"name": "SGD", "learningRate": 0.01},
}
ALL = {**NOT_FINITE, "data": spoilt(factor="nan", of_all=True), "skipSteps": {"mostInRow": 3}}
# Inputs of step 9 that are far out.
SPIKE = {
    **NOT_FINITE,
    "model": user("double_mlp", depth=0),
    "data": {
        "entrypoint": "tests.unit.trainer.loading_code:spoilt_steps",
        "config": {"first": 9, "last": 9, "factor": 30},
    },
    "optimizer": {"name": "AdamW", "learningRate": 0.001},
    "skipSteps": {"lossDeviations": 6, "window": WINDOW},
    "steps": 10,
}
INFINITE = {"entrypoint": "tests.unit.trainer.loading_code:infinite_loss_mlp"}
# Losses that stray by chance: the rate is too low for a trend.
STRAY = {
    **NOT_FINITE,
    "model": user("double_gpt"),
    "data": user("double_tokens"),
    "optimizer": {"name": "SGD", "learningRate": 0.001},
    "skipSteps": {"lossDeviations": 0.3, "window": WINDOW, "mostInRow": 100},
    # Losses of steps before an evaluation are summed by themselves, those of others with the next batch.
    "evaluation": {"interval": 3},
    "steps": 24,
}
STRAY_IN: dict[str, dict[str, Any]] = {
    "replicas": {},
    "shards": {SHARD: 2},
    "tensors": {TENSOR: 2},
    "context": {CONTEXT: 2},
    "pipeline": {PIPELINE: 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "shards": {SHARD: 2},
    "pipeline": {PIPELINE: 2, "pipeline": {"microbatches": 2}},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    trainings = {"not finite": NOT_FINITE, "too large": TOO_LARGE, "without": {**NOT_FINITE, "skipSteps": None}}
    trainings |= {"spike": SPIKE, "spike, 8 steps": SPIKE | {"steps": 8}, "spike, 9 steps": SPIKE | {"steps": 9}}
    trainings |= {"spike, by norm alone": SPIKE | {"skipSteps": {"window": WINDOW}}, "stray": STRAY}
    trainings["infinite"] = SPIKE | {"model": INFINITE, "loss": {"name": "Model"}, "skipSteps": {}}
    # Until before the first step that is skipped, and with it.
    first = {f"{steps} steps": {**NOT_FINITE, "steps": steps} for steps in (1, 2, 3)}
    cases = {name: [{"training": training}] for name, training in (trainings | first).items()}
    cases["too large, resumed"] = [{"training": TOO_LARGE, "stop_after": 12}, {"training": TOO_LARGE}]
    cases["stray, resumed"] = [{"training": STRAY, "stop_after": 16}, {"training": STRAY}]
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {name: [{"training": NOT_FINITE, "parallelism": layout}] for name, layout in LAYOUTS.items()}
    cases |= {f"stray, {name}": [{"training": STRAY, "parallelism": layout}] for name, layout in STRAY_IN.items()}
    cases |= {"too large": [{"training": TOO_LARGE}], "spike": [{"training": SPIKE}]}
    cases["all"] = [{"training": ALL}]
    return run_cases(tmp_path_factory.mktemp("two"), 2, cases)


def skipped_at(result: dict[str, Any]) -> list[int]:
    """The steps after which the count was higher than before."""
    counts = [0, *series(result, "skipped_steps")]
    return [step for step, (before, after) in enumerate(pairwise(counts), 1) if after > before]


def test_no_update_is_made_of_a_gradient_that_is_not_finite(alone: dict[str, dict[str, Any]]) -> None:
    assert alone["not finite"]["errors"] == [None]
    skipped = skipped_at(alone["not finite"])
    # The sample comes once in each epoch of three steps.
    assert [math.ceil(step / 3) for step in skipped] == list(range(1, 8))[: len(skipped)]
    assert len(skipped) >= STEPS // 3
    assert alone["not finite"]["report"].skipped_steps == len(skipped)
    first = skipped[0]
    require_same_bits(alone[f"{first} steps"]["parameters"], alone[f"{first - 1} steps"]["parameters"])


def test_without_it_such_a_step_ends_the_job(alone: dict[str, dict[str, Any]]) -> None:
    (error,) = alone["without"]["errors"]
    assert error.startswith("NonFiniteLoss: the loss of step ")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_skip_alike(alone: dict[str, dict[str, Any]], two: dict[str, dict[str, Any]], layout: str) -> None:
    assert two[layout]["errors"] == [None]
    assert skipped_at(two[layout]) == skipped_at(alone["not finite"])
    require_same(two[layout]["parameters"], alone["not finite"]["parameters"])


def test_a_norm_far_above_the_median_is_skipped_once_the_window_is_full(alone, two):
    skipped = skipped_at(alone["too large"])
    assert skipped
    assert min(skipped) > WINDOW
    assert skipped_at(two["too large"]) == skipped
    require_same(two["too large"]["parameters"], alone["too large"]["parameters"])


def test_a_loss_far_above_the_last_ones_is_skipped(alone: dict[str, dict[str, Any]], two: dict[str, dict[str, Any]]):
    assert alone["spike"]["errors"] == [None]
    assert skipped_at(alone["spike"]) == [9] == skipped_at(two["spike"])
    assert skipped_at(alone["spike, by norm alone"]) == []
    require_same_bits(alone["spike, 9 steps"]["parameters"], alone["spike, 8 steps"]["parameters"])
    require_same(two["spike"]["parameters"], alone["spike"]["parameters"])


def test_an_infinite_loss_is_skipped_whatever_its_gradient(alone: dict[str, dict[str, Any]]) -> None:
    assert alone["infinite"]["errors"] == [None]
    assert skipped_at(alone["infinite"]) == [9]


@pytest.mark.parametrize("layout", STRAY_IN)
def test_layouts_judge_one_loss(alone: dict[str, dict[str, Any]], two: dict[str, dict[str, Any]], layout: str) -> None:
    skipped = skipped_at(alone["stray"])
    assert min(skipped) > WINDOW
    assert len({step % 3 == 0 for step in skipped}) == 2
    assert two[f"stray, {layout}"]["errors"] == [None]
    assert skipped_at(two[f"stray, {layout}"]) == skipped
    require_same(two[f"stray, {layout}"]["parameters"], alone["stray"]["parameters"])
    # The first rank's parameters alone would hide that another one has decided otherwise.
    assert series(two[f"stray, {layout}"]) == pytest.approx(series(alone["stray"]), rel=1e-9)


def test_losses_are_in_the_checkpoint(alone: dict[str, dict[str, Any]]) -> None:
    assert skipped_at(alone["stray, resumed"]) == skipped_at(alone["stray"])
    require_same_bits(alone["stray, resumed"]["parameters"], alone["stray"]["parameters"])


def test_a_resumed_run_judges_as_one_that_never_stopped(alone: dict[str, dict[str, Any]]) -> None:
    """The median and the count are in the checkpoint."""
    assert alone["too large, resumed"]["errors"][1:] == [None]
    assert skipped_at(alone["too large, resumed"]) == skipped_at(alone["too large"])
    require_same_bits(alone["too large, resumed"]["parameters"], alone["too large"]["parameters"])


def test_too_many_in_a_row_end_the_job(two: dict[str, dict[str, Any]]) -> None:
    (error,) = two["all"]["errors"]
    assert error == (
        "NonFiniteLoss: 4 steps in a row have a gradient that is not used, the last of them step 4, whose gradient "
        "norm is nan; lower `training.optimizer.learningRate`, look at the data of these steps, or raise "
        "`training.skipSteps.mostInRow`"
    )


def test_one_that_is_used_ends_the_row() -> None:
    guard = StepGuard(SkipSteps(most_in_row=1))
    for step, norm in enumerate((math.nan, 1.0, math.inf, 1.0), 1):
        assert (guard.reason_to_skip(step, 1.0, norm) is None) == math.isfinite(norm)
    assert guard.skipped == 2
    assert guard.reason_to_skip(5, 1.0, math.nan) == "gradient norm is nan"
    with pytest.raises(NonFiniteLoss, match="2 steps in a row"):
        guard.reason_to_skip(6, 1.0, math.nan)


def test_norms_that_are_skipped_do_not_move_the_median() -> None:
    guard = StepGuard(SkipSteps(above_median=2, window=8, most_in_row=100))
    assert all(guard.reason_to_skip(step, 1.0, 1.0) is None for step in range(8))
    for step in range(8, 20):
        reason = guard.reason_to_skip(step, 1.0, 2.5)
        assert reason == "gradient norm is 2.5, and the median of the last 8 is 1"
    assert guard.reason_to_skip(20, 1.0, 2.0) is None


def test_the_bound_of_losses_is_learned_from_those_that_were_used() -> None:
    guard = StepGuard(SkipSteps(loss_deviations=3, window=8, most_in_row=100))
    # Mean 2, standard deviation 1. Losses may be negative: their zero means nothing.
    for offset in (0.0, -100.0):
        guard.load_state_dict({"state": '{"skipped": 0, "in_row": 0, "losses": [], "norms": []}'})
        assert all(guard.reason_to_skip(step, offset + loss, 1.0) is None for step, loss in enumerate((1.0, 3.0) * 4))
        for step in range(8, 20):
            reason = guard.reason_to_skip(step, offset + 5.01, 1.0)
            mean = f"the mean {2 + offset:.4g} and the standard deviation 1"
            assert reason == f"loss is {5.01 + offset:.4g}, and the last 8 have {mean}"
        assert guard.reason_to_skip(20, math.nan, 1.0) == "loss is nan"
        assert guard.reason_to_skip(21, offset + 4.99, 1.0) is None
        assert guard.reason_to_skip(22, offset - 50.0, 1.0) is None


def test_losses_that_are_all_alike_bound_others_by_their_rounding() -> None:
    guard = StepGuard(SkipSteps(loss_deviations=2, window=8))
    assert all(guard.reason_to_skip(step, 0.1, 1.0) is None for step in range(8))
    assert guard.reason_to_skip(8, 0.1000001, 1.0) is None
    assert guard.reason_to_skip(9, 0.1001, 1.0) is not None
    # Nothing is learned from losses of 0, which a model that fits its data may have.
    guard = StepGuard(SkipSteps(loss_deviations=2, window=8))
    assert all(guard.reason_to_skip(step, 0.0, 1.0) is None for step in range(8))
    assert guard.reason_to_skip(8, 0.5, 1.0) is None


def test_a_state_of_a_former_version_has_no_losses() -> None:
    guard = StepGuard(SkipSteps(loss_deviations=2, window=8))
    guard.load_state_dict({"state": '{"skipped": 3, "in_row": 1, "norms": [1.0]}'})
    assert guard.skipped == 3
    assert guard.reason_to_skip(1, 1e9, 1.0) is None


@pytest.mark.parametrize(
    ("state", "error", "why"),
    [
        ({}, KeyError, "^'state'$"),
        ({"state": "{"}, ValueError, "Expecting property name"),
        ({"state": "[]"}, TypeError, "list indices"),
        ({"state": '{"skipped": "x", "in_row": 0}'}, ValueError, "invalid literal for int"),
    ],
)
def test_another_state_is_an_error(state: dict[str, str], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        StepGuard(SkipSteps()).load_state_dict(state)
