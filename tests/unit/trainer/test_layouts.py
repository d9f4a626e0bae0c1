"""Every layout of the mesh computes what one process computes: parameters, gradients, losses, evaluation."""

import pytest

from tests.unit.trainer.comparisons import (
    ACCURACY,
    HELD_OUT_LOSS,
    LOSS,
    require_same,
    require_same_figures,
    require_same_gradients,
    series,
)
from tests.unit.trainer.layouts import CONTEXT, LAYOUTS, PIPELINE, REPLICATE, SHARD, TENSOR, TRAININGS
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, run_layouts

pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

TOLERANCE = 1e-10
# Single precision keeps seven digits, and steps add up what is lost.
SINGLE = 1e-5


def tolerance_of(training):
    return SINGLE if "FP32" in training else TOLERANCE


@pytest.fixture(scope="module")
def layouts(asked_for):
    return {name: LAYOUTS[name] for name in LAYOUTS if name in asked_for("test_layouts", "layout")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, layouts):
    # Jobs that go on in another layout are held to the last.
    trainings = sorted({training for _, training, _, _ in layouts.values()} | {"gpt, AdamW"})
    cases = {name: [{"training": TRAININGS[name]}] for name in trainings}
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases)


@pytest.fixture(scope="module")
def together(tmp_path_factory, layouts):
    return run_layouts(tmp_path_factory, TRAININGS, layouts)


@pytest.mark.parametrize("layout", LAYOUTS)
class TestLayoutsEqualOneProcess:
    def test_parameters(self, alone, together, layout):
        _, training, _, _ = LAYOUTS[layout]
        assert together[layout]["errors"] == [None]
        require_same(together[layout]["parameters"], alone[training]["parameters"], tolerance_of(training))

    def test_gradients_of_the_first_step(self, alone, together, layout):
        _, training, _, _ = LAYOUTS[layout]
        expected = alone[training]["gradients"]
        assert expected.keys() == alone[training]["parameters"].keys()
        require_same_gradients(together[layout]["gradients"], expected, tolerance_of(training))

    def test_metrics_of_every_step(self, alone, together, layout):
        _, training, _, _ = LAYOUTS[layout]
        require_same_figures(
            together[layout], alone[training], (LOSS, "grad_norm", HELD_OUT_LOSS, ACCURACY),
            steps=TRAININGS[training]["steps"], tolerance=tolerance_of(training),
        )  # fmt: skip


def test_training_moves_the_parameters(alone):
    """So that equality above is not that of standing still."""
    for result in alone.values():
        losses = series(result)
        assert losses[-1] != pytest.approx(losses[0], rel=1e-3)


CHANGES = {
    "dp2 x tp2 to fsdp4": ({REPLICATE: 2, TENSOR: 2}, {SHARD: 4}),
    "dp4 to dp2 x tp2": ({}, {REPLICATE: 2, TENSOR: 2}),
    "dp2 x tp2 to dp4": ({REPLICATE: 2, TENSOR: 2}, {}),
    "dp4 to pp2 x tp2": ({}, {PIPELINE: 2, TENSOR: 2}),
    "pp2 x fsdp2 to dp4": ({PIPELINE: 2, SHARD: 2}, {}),
    "fsdp2 x cp2 to dp4": ({SHARD: 2, CONTEXT: 2}, {}),
    "dp4 to cp4": ({}, {CONTEXT: 4}),
    "pp2 x dp2 to pp4": ({PIPELINE: 2}, {PIPELINE: 4}),
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    # What is evaluated is gathered, and then saved.
    training = TRAININGS["gpt, AdamW"] | {"evaluation": {"interval": 1}}
    cases = {
        name: [
            {"training": training, "parallelism": first, "stop_after": 2},
            {"training": training, "parallelism": second},
        ]
        for name, (first, second) in CHANGES.items()
    }
    return run_cases(tmp_path_factory.mktemp("resumed"), 4, cases)


@pytest.mark.parametrize("change", CHANGES)
def test_a_job_stopped_in_one_layout_goes_on_in_another(alone, resumed, change):
    stopped, ended = resumed[change]["errors"]
    assert "stopped after step 2, its checkpoint is written" in stopped
    assert ended is None
    require_same(resumed[change]["parameters"], alone["gpt, AdamW"]["parameters"])
