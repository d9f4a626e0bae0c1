"""With compressed gradients jobs learn what they learn without, on real data, at ratios that are worth it."""

import pytest

from tests.soak import SOAK
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases

pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

RANKS = 2


def digits(**optimizer):
    return {
        "model": {"name": "mlp"},
        "data": {"name": "digits"},
        "optimizer": {"name": "SGD", **optimizer},
        "lrSchedule": {"name": "Cosine", "warmupSteps": 10},
        "steps": 500 if SOAK else 300,
        "globalBatchSize": 64,
        "seed": 1,
        "logging": {"interval": 100},
        "checkpoint": {"interval": 1000},
    }


MOMENTUM = digits(learningRate=0.05, momentum=0.9)
# Training, compression, and how many times fewer bytes are sent after the warm-up, at least.
DIGITS = {
    "FP16": (MOMENTUM, {}, 2),
    "BF16": (MOMENTUM, {}, 2),
    "Int8": (MOMENTUM, {}, 3.9),
    "OneBit": (MOMENTUM, {"warmupSteps": 30}, 28),
    "TopK": (MOMENTUM, {"ratio": 0.01, "warmupSteps": 30}, 49),
    "TopK, momentum corrected": (
        digits(learningRate=0.2),
        {"ratio": 0.01, "warmupSteps": 30, "momentumCorrection": 0.9},
        49,
    ),
    "RandomK": (MOMENTUM, {"ratio": 0.25, "warmupSteps": 30}, 3.9),
    "PowerSGD": (MOMENTUM, {"rank": 2}, 12),
}


def run(folder, plain, compressed):
    """Results of the plain training and of all others, in one world."""
    cases = {"plain": [{"training": plain}]}
    for name, (training, settings, _) in compressed.items():
        compression = {"name": name.split(",")[0], **settings}
        cases[name] = [{"training": training, "parallelism": {"dataParallel": {"compression": compression}}}]
    return run_cases(folder, RANKS, cases)


def bytes_at_the_end(result):
    return [line["comm/gradient_bytes"] for line in result["metrics"] if "lr" in line][-1]


@pytest.fixture(scope="module")
def digit_results(tmp_path_factory):
    return run(tmp_path_factory.mktemp("digits"), MOMENTUM, DIGITS)


@pytest.mark.parametrize("name", DIGITS)
def test_digits_are_recognised_as_well(digit_results, name):
    plain, found = digit_results["plain"], digit_results[name]
    assert plain["report"].metrics["accuracy"] >= 0.95
    assert found["report"].metrics["accuracy"] >= plain["report"].metrics["accuracy"] - 0.01
    assert bytes_at_the_end(plain) >= DIGITS[name][2] * bytes_at_the_end(found)
