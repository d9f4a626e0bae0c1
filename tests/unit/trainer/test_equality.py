"""Two and three ranks compute what one process computes on the whole batch."""

import math

import pytest

from tests.unit.trainer.comparisons import LOSS, require_same, require_same_figures, series
from tests.unit.trainer.worlds import run_cases, small, user

TOLERANCE = 1e-10

ADAMW = {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1}
SGD = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9, "nesterov": True, "weightDecay": 0.01}
EVERY_STEP = {"logging": {"interval": 1}}
TAGGER = {"model": user("double_tagger"), "data": user("ragged_tokens")}
PLAIN = {"name": "SGD", "learningRate": 0.5}
ROWS = {"entrypoint": "tests.unit.trainer.table_code:row_samples"}


def tabled(**config):
    return {"entrypoint": "tests.unit.trainer.table_code:tabled", "config": config}


COSINE = {"lrSchedule": {"name": "Cosine", "warmupSteps": 3}}

# Seven steps are two epochs and a bit: 50 samples in batches of 24 end in one of 2.
TRAININGS = {
    "SGD with momentum": small(steps=7, optimizer=SGD, **EVERY_STEP),
    "SGD, gradients clipped": small(steps=7, optimizer=SGD, maxGradientNorm=0.3, **EVERY_STEP),
    "AdamW, cosine, clipped": small(steps=7, optimizer=ADAMW, maxGradientNorm=0.3, **COSINE, **EVERY_STEP),
    "label smoothing": small(steps=7, optimizer=SGD, loss={"labelSmoothing": 0.2}, **EVERY_STEP),
    "squared error": small(steps=7, optimizer=SGD, loss={"name": "MeanSquaredError"}, **EVERY_STEP),
    "sequences of unequal length": small(steps=7, optimizer=SGD, **TAGGER, **EVERY_STEP),
    "rows of sparse embeddings, clipped": small(
        steps=7, optimizer=PLAIN, maxGradientNorm=0.1, model=tabled(sparse=True), data=ROWS, **EVERY_STEP
    ),
    "a parameter without use": small(steps=7, optimizer=SGD, model=user("partly_used"), **EVERY_STEP),
}
ACCUMULATION = (1, 4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    cases = {name: [{"training": training}] for name, training in TRAININGS.items()}
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases)


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def together(request, tmp_path_factory):
    cases = {
        f"{name}, {steps}": [{"training": {**training, "gradientAccumulationSteps": steps}}]
        for name, training in TRAININGS.items()
        for steps in ACCUMULATION
    }
    return run_cases(tmp_path_factory.mktemp("together"), request.param, cases)


@pytest.mark.parametrize("steps", ACCUMULATION)
@pytest.mark.parametrize("name", TRAININGS)
class TestRanksEqualOneProcess:
    def test_parameters(self, alone, together, name, steps):
        require_same(together[f"{name}, {steps}"]["parameters"], alone[name]["parameters"])

    def test_metrics_of_every_step(self, alone, together, name, steps):
        require_same_figures(together[f"{name}, {steps}"], alone[name], (LOSS, "grad_norm", "lr"), steps=7)

    def test_evaluation(self, alone, together, name, steps):
        expected, found = (result["report"].metrics for result in (alone[name], together[f"{name}, {steps}"]))
        assert found == pytest.approx(expected, rel=TOLERANCE)


def test_rows_of_sparse_embeddings_are_those_of_dense_ones(alone, tmp_path):
    sparse = "rows of sparse embeddings, clipped"
    dense = run_cases(tmp_path, 1, {"dense": [{"training": TRAININGS[sparse] | {"model": tabled(sparse=False)}}]})
    require_same(alone[sparse]["parameters"], dense["dense"]["parameters"])
    require_same_figures(alone[sparse], dense["dense"], ["grad_norm"], steps=7)


def test_training_moves_the_parameters(alone):
    """So that equality above is not that of standing still."""
    losses = series(alone["SGD with momentum"])
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) == len(losses)
