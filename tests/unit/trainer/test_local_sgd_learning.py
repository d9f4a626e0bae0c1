"""Replicas that meet less often learn as much from as many samples: the digits, and Python byte by byte.

The text is one of the long variants; so are the digits in modes that an example of ours, or pods, learn them in, too.
"""

import pytest

from tests.soak import SOAK
from tests.unit.trainer.worlds import of_example, run_cases

MODES = {
    "local SGD": {"mode": "LocalSGD", "localSGD": {"period": 8}},
    "post-local SGD": {"mode": "LocalSGD", "localSGD": {"period": 8, "warmupSteps": 50}},
    # 25 outer steps are too few for the momentum that DiLoCo's hundreds have.
    "DiLoCo": {"mode": "LocalSGD", "localSGD": {"period": 8, "outerOptimizer": {"momentum": 0.5}}},
    "BMUF": {"mode": "BMUF", "bmuf": {"period": 8}},
}
DIGITS = {name: mode for name, mode in MODES.items() if SOAK or name == "DiLoCo"}
IN_PODS = {"mode": "LocalSGD", "localSGD": {"period": 4, "globalPeriod": 16}}
# Of DDP's held-out loss, above which it may lie; knowing nothing costs twice as much.
WITHIN = 0.03


def learned(folder, training, data_parallel, ranks=2, ranks_per_pod=1):
    run = {"training": training, "parallelism": {"dataParallel": data_parallel}, "ranks_per_pod": ranks_per_pod}
    result = run_cases(folder, ranks, {"case": [run]})["case"]
    assert result["errors"] == [None]
    return result["report"].metrics


@pytest.mark.parametrize("name", DIGITS)
def test_held_out_digits_are_recognised(tmp_path, name):
    assert learned(tmp_path, of_example("ddp"), MODES[name])["accuracy"] >= 0.97


def test_pods_recognise_held_out_digits(tmp_path):
    assert learned(tmp_path, of_example("ddp"), IN_PODS, ranks=4, ranks_per_pod=2)["accuracy"] >= 0.97


@pytest.fixture(scope="module")
def text():
    """A small GPT on the sources of the standard library, for fewer steps than the example."""
    model = {"name": "gpt", "config": {"layers": 2, "heads": 2, "width": 32}}
    data = {"name": "text", "config": {"sequenceLength": 32, "heldOutFraction": 0.005}}
    return of_example("gpt-text", model=model, data=data)


@pytest.fixture(scope="module")
def loss_of_ddp(tmp_path_factory, text):
    return learned(tmp_path_factory.mktemp("ddp"), text, {})["loss"]


@pytest.mark.skipif(not SOAK, reason="one of the long variants")
@pytest.mark.parametrize("name", MODES)
def test_text_is_learned_nearly_as_well_as_by_ddp(tmp_path, text, loss_of_ddp, name):
    assert learned(tmp_path, text, MODES[name])["loss"] <= (1 + WITHIN) * loss_of_ddp
