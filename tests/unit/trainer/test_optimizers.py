"""Which loops the optimizers use: fused ones on GPUs, which fake tensors can stand for."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor

from disttrain_api.training import Optimizer, OptimizerName
from disttrain_trainer.optim import optimizers
from disttrain_trainer.optim.groups import FACTOR, STACKED, groups_of
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


# The other parameter than one that is cut; by name of the optimizer, whether all are updated by one kernel
BESIDE_CUT = {
    "cut": (lambda mesh: distribute_tensor(torch.ones(4), mesh, [Shard(0)]), {"SGD": None, "AdamW": True}),
    "one number": (lambda mesh: torch.tensor(1.0), {"SGD": None, "AdamW": True}),
    "a bias": (lambda mesh: torch.ones(4), {"SGD": None, "AdamW": None}),
    "nothing": (lambda mesh: torch.ones(0, 4), {"SGD": None, "AdamW": None}),
}


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("beside", BESIDE_CUT)
def test_what_ranks_hold_parts_of_is_updated_as_torch_can(mesh, monkeypatch, name, beside):
    monkeypatch.setattr(optimizers, "fuses_updates", lambda device: True)
    other, fused = BESIDE_CUT[beside]
    both = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])), nn.Parameter(other(mesh))]
    optimizer = build_optimizer(Optimizer(name=name, momentum=0.9 if name == "SGD" else None), both)
    assert optimizer.defaults["fused"] is fused[name]
    for one in both:
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert all(bool((one.detach() < 1).all()) for one in both)


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


def test_of_what_experts_share_a_tensor_of_their_vectors_are_no_matrix():
    experts = {"matrix": nn.Parameter(torch.ones(4, 2, 3)), "bias": nn.Parameter(torch.ones(4, 3))}
    for parameter in experts.values():
        setattr(parameter, STACKED, True)
    decays, spared = groups_of(Optimizer(weight_decay_on="Matrices"), experts)
    assert decays == {"params": [experts["matrix"]]}
    assert spared == {"params": [experts["bias"]], "weight_decay": 0.0}


@pytest.mark.parametrize("name", OptimizerName)
def test_decay_of_matrices_is_torchs_with_two_groups(name):
    settings = Optimizer(name=name, learning_rate=0.1, weight_decay=0.5, weight_decay_on="Matrices")
    torch.manual_seed(3)
    ours, theirs = (nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    spared = [parameter for parameter in theirs.parameters() if parameter.dim() == 1]
    matrices = [parameter for parameter in theirs.parameters() if parameter.dim() == 2]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": spared, "weight_decay": 0.0}]
    pairs = [
        (ours, build_optimizer(settings, dict(ours.named_parameters()))),
        (theirs, getattr(torch.optim, name.value)(groups, lr=0.1)),
    ]
    batches = torch.randn(5, 8, 4, dtype=torch.float64)
    for batch in batches:
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
