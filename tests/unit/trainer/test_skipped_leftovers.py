"""`training.skipSteps` where a step leaves more behind than its update: errors of a compression, FP16's loss scale."""

from typing import Any

import pytest

from tests.unit.trainer.comparisons import LOSS, require_same_bits, series
from tests.unit.trainer.test_half_precision import LOPSIDED
from tests.unit.trainer.worlds import run_cases, small

CODE = "tests.unit.trainer.loading_code"
KEEPING: dict[str, dict[str, Any]] = {
    "OneBit": {},
    "TopK": {"ratio": 0.1},
    "TopK, momentum": {"ratio": 0.1, "momentumCorrection": 0.5},
    "PowerSGD": {"rank": 1},
    "PowerSGD, warming up": {"rank": 1, "warmupSteps": 2},
}
FIRST, LATER = 1, 4
"""Steps that are skipped: one before which nothing is kept, and another."""
# Steps of warm-up are counted, the skipped one as well.
SKIPPED = [(name, step) for name in KEEPING for step in (FIRST, LATER) if step == LATER or "warming" not in name]
STEPS = 8


def compressed(name: str) -> dict[str, Any]:
    return {"dataParallel": {"compression": {"name": name.partition(",")[0], **KEEPING[name]}}}


def spoilt(step: int, **config: Any) -> dict[str, Any]:
    """A training whose samples of one step are no numbers."""
    data = {"entrypoint": f"{CODE}:spoilt_steps", "config": {"first": step, "last": step, **config}}
    sgd = {"name": "SGD", "learningRate": 0.1}
    return small(data=data, optimizer=sgd, skipSteps={}, steps=STEPS, logging={"interval": 1})


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {}
    for name, step in SKIPPED:
        run = {"training": spoilt(step), "parallelism": compressed(name)}
        without = spoilt(step, passed_over=(step - 1, 1)) | {"steps": STEPS - 1}
        cases[f"{name}, {step}"] = [run]
        cases[f"{name}, {step}, resumed"] = [run | {"stop_after": step}, run]
        cases[f"{name}, {step}, without"] = [run | {"training": without}]
    # Which numbers are sent is by the number of the step.
    random = {"dataParallel": {"compression": {"name": "RandomK", "ratio": 0.1}}}
    run = {"training": spoilt(LATER), "parallelism": random}
    cases |= {"RandomK": [run], "RandomK, resumed": [run | {"stop_after": LATER}, run]}
    return run_cases(tmp_path_factory.mktemp("two"), 2, cases)


@pytest.mark.parametrize(("name", "step"), SKIPPED)
def test_a_skipped_step_leaves_nothing_in_what_is_kept(two: dict[str, dict[str, Any]], name: str, step: int) -> None:
    """Red where one number that is none stays among what is kept: no later step would be used."""
    found, resumed, without = (two[f"{name}, {step}{how}"] for how in ("", ", resumed", ", without"))
    assert found["errors"] == without["errors"] == [None]
    assert series(found, "skipped_steps") == [0] * (step - 1) + [1] * (STEPS - step + 1)
    require_same_bits(found["parameters"], without["parameters"])
    require_same_bits(resumed["parameters"], found["parameters"])


def test_random_numbers_go_on_after_a_skipped_step(two: dict[str, dict[str, Any]]) -> None:
    assert two["RandomK"]["errors"] == [None]
    assert series(two["RandomK"], "skipped_steps")[-1] == 1
    # JSON knows no NaN.
    assert [step for step, loss in enumerate(series(two["RandomK"]), 1) if loss is None] == [LATER]
    require_same_bits(two["RandomK, resumed"]["parameters"], two["RandomK"]["parameters"])


FP16 = small(
    model={"entrypoint": f"{CODE}:InfiniteGradient"},
    data={"entrypoint": "tests.unit.trainer.user_code:float_samples"},
    optimizer={"name": "SGD", "learningRate": 0.1},
    precision="FP16",
    logging={"interval": 1},
    steps=30,
)
SPOILT = FP16 | {
    "model": {"entrypoint": "tests.unit.trainer.user_code:lopsided"},
    "optimizer": LOPSIDED["optimizer"],
    "data": {"entrypoint": f"{CODE}:spoilt_floats"},
}


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    trainings = {
        "overflows": LOPSIDED,
        "overflows, judged": LOPSIDED | {"skipSteps": {"mostInRow": 0}},
        "spoilt": SPOILT | {"skipSteps": {}},
        "not spoilt": SPOILT | {"data": FP16["data"]},
        "never finite": FP16,
        "never finite, judged": FP16 | {"skipSteps": {"mostInRow": 3}},
    }
    cases = {name: [{"training": training}] for name, training in trainings.items()}
    return run_cases(tmp_path_factory.mktemp("halves"), 1, cases)


def test_a_gradient_that_the_loss_scale_made_overflow_is_no_skipped_step(halves: dict[str, dict[str, Any]]) -> None:
    found, expected = halves["overflows, judged"], halves["overflows"]
    assert found["errors"] == expected["errors"] == [None]
    assert found["scale"] == expected["scale"] < 2**16
    assert set(series(found, "skipped_steps")) == {0}
    require_same_bits(found["parameters"], expected["parameters"])


def test_a_loss_that_is_not_finite_is_skipped_and_is_not_the_scales_fault(halves: dict[str, dict[str, Any]]) -> None:
    found = halves["spoilt"]
    assert found["errors"] == [None]
    counts, losses = series(found, "skipped_steps"), series(found)
    assert counts[-1] == losses.count(None) >= len(losses) // 3
    assert found["scale"] == halves["not spoilt"]["scale"] > 1


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("never finite", "the gradient norm of step 17 is "),
        ("never finite, judged", "4 steps in a row have a gradient that is not used, the last of them step 20, whose "),
    ],
)
def test_at_a_scale_of_one_a_gradient_that_is_not_finite_is_so_by_itself(
    halves: dict[str, dict[str, Any]], name: str, error: str
) -> None:
    """Red where FP16 trains on without an update ever, to a scale of 0."""
    assert halves[name]["errors"][0].startswith(f"NonFiniteLoss: {error}")
    assert len(series(halves[name], LOSS)) >= 16
