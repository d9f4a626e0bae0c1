"""Which loops the optimizers use: fused ones on GPUs, which fake tensors can stand for."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from disttrain_api.training import Optimizer, OptimizerName
from disttrain_trainer.optim.groups import FACTOR, groups_of
from disttrain_trainer.optim.optimizers import build_optimizer


def parameters(*devices):
    with FakeTensorMode():
        return [nn.Parameter(torch.empty(3, device=device)) for device in devices]


@pytest.mark.parametrize("name", OptimizerName)
@pytest.mark.parametrize(
    ("devices", "fused"), [(("cuda", "cuda"), True), (("cpu", "cpu"), None), (("cuda", "cpu"), None)]
)
def test_fused_where_all_parameters_are_on_gpus(name, devices, fused):
    optimizer = build_optimizer(Optimizer(name=name), parameters(*devices))
    assert optimizer.defaults["fused"] is fused
    assert {group["fused"] for group in optimizer.param_groups} == {fused}


def test_groups_go_by_shape_and_by_the_first_pattern_that_matches():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    settings = Optimizer(
        weight_decay_on="Matrices",
        groups=[{"pattern": "2.bias", "learningRateFactor": 3}, {"pattern": "2.*", "learningRateFactor": 2}],
    )
    named = dict(model.named_parameters())
    found = {
        name: (group.get("weight_decay"), group.get(FACTOR))
        for group in groups_of(settings, named)
        for name, parameter in named.items()
        if any(parameter is one for one in group["params"])
    }
    assert found == {
        "0.weight": (None, None),
        "0.bias": (0.0, None),
        "1.weight": (0.0, None),
        "1.bias": (0.0, None),
        "2.weight": (None, 2.0),
        "2.bias": (0.0, 3.0),
    }
    assert groups_of(Optimizer(), named) == [{"params": list(model.parameters())}]
