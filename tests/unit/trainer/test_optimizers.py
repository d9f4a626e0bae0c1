"""Which loops the optimizers use: fused ones on GPUs, which fake tensors can stand for."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from disttrain_api.training import Optimizer, OptimizerName
from disttrain_trainer.optimizers import build_optimizer


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
