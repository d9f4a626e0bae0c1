"""What a model brings along, a loss of its own and layers, counts in every layout; what it lacks is refused by name."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from disttrain_trainer.parallel.share import require_elements_apart
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.user_layers import of_layers
from tests.unit.trainer.worlds import require_same, run_cases, small, user

OWN = {"loss": {"name": "Model"}}
LAYOUTS = {
    "dp2": {},
    "fsdp2": {"dataParallelShardDegree": 2},
    "pp2": {"pipelineParallelDegree": 2, "pipeline": {"microbatches": 4}},
    "devices": {"devicesPerProcess": 2},
}
ODD = small(model=of_layers("odd_buffers"), steps=3, evaluation={"interval": 1, "onFailure": "Fail"})
ODD_LAYOUTS = {
    "dp2": {},
    "dp2, static graph": {"dataParallel": {"staticGraph": True}},
    "fsdp2": {"dataParallelShardDegree": 2},
    "local SGD": {"dataParallel": {"mode": "LocalSGD", "localSGD": {"period": 2}}},
}
REFUSED = {
    "a buffer whose elements share memory": (
        small(model=of_layers("expanded_buffer")),
        {},
        "elements of the model's `0.ids` share memory: its shape is [3, 5] and its strides are [0, 1], so that nothing",
    ),
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
    for name, parallelism in ODD_LAYOUTS.items():
        run = {"training": ODD, "parallelism": parallelism}
        cases[f"odd, {name}"] = [{**run, "stop_after": 1}, run]
    return named | run_cases(tmp_path_factory.mktemp("together"), 2, cases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_models_own_loss_trains_what_the_same_one_by_name_does(results, layout):
    assert results[layout]["errors"] == [None]
    require_same(results[layout]["parameters"], results["alone"]["parameters"])


@pytest.mark.parametrize("layout", ODD_LAYOUTS)
def test_buffers_of_any_format_and_layout_are_those_of_the_first_rank(results, layout):
    stopped, ended = results[f"odd, {layout}"]["errors"]
    assert stopped.startswith("Stopped: ")
    assert ended is None


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_model_has_not_is_refused_by_name(results, case):
    (error,) = results[case]["errors"]
    assert error.startswith("InvalidConfiguration: ")
    assert REFUSED[case][2] in error


@pytest.mark.parametrize(
    ("tensor", "refused"),
    [
        (torch.arange(4).expand(1, 4), None),
        (torch.zeros(0, 1).expand(0, 3), None),
        (torch.zeros(3, 4)[:, 2], None),
        (torch.zeros(6).unfold(0, 3, 1), None),
        (
            torch.tensor(1.0).expand(2),
            r"elements of the model's `1\.held` share memory: its shape is \[2\] and its strides",
        ),
        (
            torch.eye(2).to_sparse(),
            r"the model's `1\.held` is a tensor of layout torch\.sparse_coo, which ranks cannot",
        ),
    ],
)
def test_a_buffer_that_nothing_can_be_written_to_is_named(tensor, refused):
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].register_buffer("held", tensor)
    with pytest.raises(InvalidConfiguration, match=refused) if refused else nullcontext():
        require_elements_apart(model)
