"""What a model brings along, a loss of its own and layers, counts in every layout; what it lacks is refused by name."""

import pytest

from tests.unit.trainer.user_layers import of_layers
from tests.unit.trainer.worlds import require_same, run_cases, small, user

OWN = {"loss": {"name": "Model"}}
LAYOUTS = {
    "dp2": {},
    "fsdp2": {"dataParallelShardDegree": 2},
    "pp2": {"pipelineParallelDegree": 2, "pipeline": {"microbatches": 4}},
    "devices": {"devicesPerProcess": 2},
}
REFUSED = {
    "no loss": (small(**OWN), {}, "`training.loss.name` Model: the model Sequential has no method `loss("),
    "a mean for all": (
        small(**OWN, model=user("mlp_with_loss", reduced="mean")),
        {},
        "WithLoss.loss(outputs, targets) returned a tensor of shape [], expected [12]",
    ),
    "arrays as extra state": (
        small(model=of_layers("arrays")),
        {},
        "get_extra_state() of the model's Arrays['calls'] is a numpy.ndarray, expected tensors, numbers, texts,",
    ),
    "no layers to compute anew": (
        small(model=user("bare_mlp"), activationCheckpointing="Full"),
        {},
        "`training.activationCheckpointing` Full: the model Bare shows no layers",
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    named = run_cases(tmp_path_factory.mktemp("alone"), 1, {"alone": [{"training": small()}]})
    own = small(**OWN, model=user("mlp_with_loss"))
    cases = {name: [{"training": own, "parallelism": parallelism}] for name, parallelism in LAYOUTS.items()}
    for name, (training, parallelism, _) in REFUSED.items():
        cases[name] = [{"training": training, "parallelism": parallelism}]
    return named | run_cases(tmp_path_factory.mktemp("together"), 2, cases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_models_own_loss_trains_what_the_same_one_by_name_does(results, layout):
    assert results[layout]["errors"] == [None]
    require_same(results[layout]["parameters"], results["alone"]["parameters"])


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_model_has_not_is_refused_by_name(results, case):
    (error,) = results[case]["errors"]
    assert error.startswith("InvalidConfiguration: ")
    assert REFUSED[case][2] in error
