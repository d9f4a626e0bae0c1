"""Gradients of older weights teach as much from as many samples: the digits."""

import pytest

from tests.unit.trainer.worlds import of_example, run_cases

PIPELINES = {
    "PipeDream": {"schedule": "PipeDream"},
    "PipeDream, vertical sync": {"schedule": "PipeDream", "verticalSync": True},
    "PipeDream-2BW": {"schedule": "PipeDream2BW"},
}


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    described = of_example("pipedream")
    cases = {
        name: [
            {
                "training": described,
                "parallelism": {"pipelineParallelDegree": 2, "pipeline": {**pipeline, "split": "Parameters"}},
            }
        ]
        for name, pipeline in PIPELINES.items()
    }
    return run_cases(tmp_path_factory.mktemp("learned"), 2, cases)


@pytest.mark.parametrize("name", PIPELINES)
def test_held_out_digits_are_recognised(learned, name):
    assert learned[name]["errors"] == [None]
    assert learned[name]["report"].metrics["accuracy"] >= 0.97
