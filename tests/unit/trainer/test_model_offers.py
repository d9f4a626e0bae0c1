"""What a model brings along, a loss of its own and layers, counts in every layout; what it lacks is refused by name."""

from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn

from disttrain_trainer.evaluate import evaluating
from disttrain_trainer.parallel.share import require_elements_apart
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.comparisons import require_same, require_same_bits
from tests.unit.trainer.user_layers import frozen_norms, of_layers
from tests.unit.trainer.worlds import run_cases, small, user

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
FROZEN = small(model=of_layers("frozen_norms"))
REFUSED = {
    "a buffer whose elements share memory": (
        small(model=of_layers("expanded_buffer")),
        {},
        "elements of the model's `0.ids` share memory: its shape is [3, 5] and its strides are [0, 1], so that nothing",
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
    cases["frozen"] = [{"training": FROZEN}]
    cases["frozen, evaluated"] = [{"training": FROZEN | {"evaluation": {"interval": 1}}}]
    cases["in evaluation mode"] = [{"training": FROZEN | {"model": of_layers("frozen_norms", whole=True)}}]
    folder = tmp_path_factory.mktemp("together")
    return named | {"folder": folder} | run_cases(folder, 2, cases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_models_own_loss_trains_what_the_same_one_by_name_does(results, layout):
    assert results[layout]["errors"] == [None]
    require_same(results[layout]["parameters"], results["alone"]["parameters"])


def test_training_does_not_depend_on_how_often_one_evaluates(results):
    often, once = results["frozen, evaluated"], results["frozen"]
    assert (often["errors"], once["errors"]) == ([None], [None])
    require_same_bits(often["parameters"], once["parameters"])
    moved = [name for name, value in once["parameters"].items() if name.endswith("tracked") and value > 0]
    assert moved == ["2.num_batches_tracked"]


def test_a_model_that_comes_in_evaluation_mode_stays_in_it_and_the_log_says_so(results):
    found = results["in evaluation mode"]
    assert found["errors"] == [None]
    assert not any(value for name, value in found["parameters"].items() if name.endswith("tracked"))
    output = (results["folder"] / "rank-0.out").read_text()
    assert output.count("the model comes in evaluation mode, in which it is trained: dropout is off, and running") == 1


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


def test_each_module_is_in_its_own_mode_again():
    model = nn.Sequential(frozen_norms(), nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Dropout())))
    model[1][1].eval()
    model[1][1][0].train()
    modes = [one.training for one in model.modules()]
    with suppress(KeyError), evaluating(model):
        assert not any(one.training for one in model.modules())
        raise KeyError
    assert [one.training for one in model.modules()] == modes
    assert [model[0][0].training, model[0][3][1].training, model[1][1].training] == [False] * 3
    assert model[1][1][0].training
