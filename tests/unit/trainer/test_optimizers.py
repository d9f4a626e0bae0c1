"""Which loops the optimizers use: fused ones where all parameters are on devices of one kind that has them."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor

from disttrain_api.builtin import GptConfig
from disttrain_api.training import Optimizer, OptimizerName
from disttrain_trainer.models.gpt import model as gpt
from disttrain_trainer.optim.groups import FACTOR, HIDDEN, STACKED, groups_of
from disttrain_trainer.optim.muon import hidden_matrices
from disttrain_trainer.optim.optimizers import build_optimizer
from disttrain_trainer.runtime.errors import InvalidConfiguration

MUON = Optimizer(name="Muon", learning_rate=0.1, weight_decay=0.5)
FUSED = [name for name in OptimizerName if name is not OptimizerName.ADAFACTOR]


def parameters(*devices):
    with FakeTensorMode():
        return [nn.Parameter(torch.empty(3, device=device)) for device in devices]


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(
    ("devices", "fused"),
    [(("cuda", "cuda"), True), (("cpu", "cpu"), True), (("meta", "cpu"), None), (("cuda", "cpu"), None)],
)
def test_fused_where_all_parameters_are_on_devices_of_one_kind(name, devices, fused):
    optimizer = build_optimizer(Optimizer(name=name), parameters(*devices))
    assert {group["fused"] for group in optimizer.param_groups} == {fused}


def test_sgd_with_momentum_is_not_fused():
    """torch's one kernel wants momentum of all parameters, or of none: test_resume has gradients that come late."""
    optimizer = build_optimizer(Optimizer(name="SGD", momentum=0.9), parameters("cpu"))
    assert {group["fused"] for group in optimizer.param_groups} == {None}


# The other parameter than one that is cut; by name of the optimizer, whether all are updated by one kernel
BESIDE_CUT = {
    "cut": (lambda mesh: distribute_tensor(torch.ones(4), mesh, [Shard(0)]), {"SGD": None, "AdamW": True}),
    "one number": (lambda mesh: torch.tensor(1.0), {"SGD": None, "AdamW": True}),
    "a bias": (lambda mesh: torch.ones(4), {"SGD": None, "AdamW": None}),
    "nothing": (lambda mesh: torch.ones(0, 4), {"SGD": None, "AdamW": None}),
}


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("beside", BESIDE_CUT)
def test_what_ranks_hold_parts_of_is_updated_as_torch_can(mesh, name, beside):
    other, fused = BESIDE_CUT[beside]
    both = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])), nn.Parameter(other(mesh))]
    optimizer = build_optimizer(Optimizer(name=name), both)
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


@pytest.mark.parametrize("name", [name for name in OptimizerName if name is not OptimizerName.MUON])
def test_decay_of_matrices_is_torchs_with_two_groups(name):
    settings = Optimizer(name=name, learning_rate=0.1, weight_decay=0.5, weight_decay_on="Matrices")
    torch.manual_seed(3)
    own, theirs = (nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)).double() for _ in range(2))
    theirs.load_state_dict(own.state_dict())
    spared = [parameter for parameter in theirs.parameters() if parameter.dim() == 1]
    matrices = [parameter for parameter in theirs.parameters() if parameter.dim() == 2]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": spared, "weight_decay": 0.0}]
    pairs = [
        (own, build_optimizer(settings, dict(own.named_parameters()))),
        (theirs, getattr(torch.optim, name.value)(groups, lr=0.1, **({"fused": True} if name in FUSED else {}))),
    ]
    train(pairs)
    require_same_bits(own, theirs)


def train(pairs, steps=5):
    """Train models [4 numbers -> any] on the same batches, each with its optimizers."""
    for batch in torch.randn(steps, 8, 4, dtype=torch.float64):
        for model, *its_optimizers in pairs:
            model.zero_grad()
            model(batch).square().mean().backward()
            for optimizer in its_optimizers:
                optimizer.step()


def require_same_bits(one, other):
    assert [name for name, value in one.state_dict().items() if not torch.equal(value, other.state_dict()[name])] == []


def deep():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 2)).double()


def with_muon(model, settings=MUON):
    """The optimizer of the model, whose hidden matrices are marked as build.py does it."""
    for name in hidden_matrices(model, settings):
        setattr(model.get_parameter(name), HIDDEN, True)
    return build_optimizer(settings, dict(model.named_parameters()))


def test_muon_is_torchs_beside_torchs_adamw():
    own, theirs = deep(), deep()
    theirs.load_state_dict(own.state_dict())
    hidden = [theirs[0].weight, theirs[2].weight]
    others = [one for one in theirs.parameters() if all(one is not matrix for matrix in hidden)]
    muon = torch.optim.Muon(hidden, lr=0.1, weight_decay=0.5, adjust_lr_fn="match_rms_adamw")
    pairs = [(own, with_muon(own)), (theirs, muon, torch.optim.AdamW(others, lr=0.1, weight_decay=0.5, fused=True))]
    train(pairs)
    require_same_bits(own, theirs)


def test_muon_takes_the_settings_that_are_given():
    given = {"momentum": 0.5, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "Original", "beta1": 0.5}
    model = deep()
    optimizer = with_muon(model, Optimizer(name="Muon", **given))
    hidden = next(group for group in optimizer.param_groups if HIDDEN in group)
    assert [hidden[name] for name in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")] == [
        0.5,
        False,
        3,
        "original",
    ]
    (betas,) = {group["betas"] for group in optimizer.param_groups if HIDDEN not in group}
    assert betas == (0.5, 0.999)


def test_adafactor_takes_the_settings_that_are_given():
    optimizer = build_optimizer(Optimizer(name="Adafactor", beta2_decay=-0.5, d=2.0), deep().parameters())
    assert (optimizer.defaults["beta2_decay"], optimizer.defaults["d"]) == (-0.5, 2.0)


def test_a_state_of_muon_that_is_loaded_is_gone_on_with():
    through, stopped, resumed = deep(), deep(), deep()
    stopped.load_state_dict(through.state_dict())
    first, second = with_muon(through), with_muon(stopped)
    train([(through, first), (stopped, second)], steps=2)
    resumed.load_state_dict(stopped.state_dict())
    third = with_muon(resumed)
    third.load_state_dict(second.state_dict())
    # The rate of a step, which step.py sets.
    for group in (*first.param_groups, *third.param_groups):
        group["lr"] = 0.03
    train([(through, first), (resumed, third)], steps=2)
    require_same_bits(through, resumed)


def test_muon_steps_matrices_that_ranks_hold_parts_of_as_whole_ones(mesh):
    weights = torch.randn(4, 6, dtype=torch.float64)
    whole, cut = nn.Parameter(weights.clone()), nn.Parameter(distribute_tensor(weights.clone(), mesh, [Shard(0)]))
    for one in (whole, cut):
        setattr(one, HIDDEN, True)
    optimizers = [build_optimizer(MUON, {"matrix": one}) for one in (whole, cut)]
    for gradient in torch.randn(3, 4, 6, dtype=torch.float64):
        whole.grad, cut.grad = gradient.clone(), distribute_tensor(gradient.clone(), mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(cut.detach().full_tensor(), whole.detach(), rtol=1e-12, atol=1e-12)


def small_gpt(**config):
    sizes = {"vocabularySize": 16, "layers": 1, "heads": 2, "width": 8, "sequenceLength": 8}
    return gpt.build(GptConfig.model_validate(sizes | config, by_alias=True))


BLOCK = {f"blocks.0.attention.{name}.weight" for name in ("query", "key", "value", "out")}
FEED_FORWARD = {"blocks.0.feed_forward.0.weight", "blocks.0.feed_forward.2.weight"}
HIDDEN_OF = {
    "tied": (small_gpt, {}, BLOCK | FEED_FORWARD),
    "untied": (small_gpt, {"tieWeights": False}, BLOCK | FEED_FORWARD),
    "experts": (small_gpt, {"experts": 2}, BLOCK | {"blocks.0.feed_forward.router.weight"}),
    "layers in a row": (deep, {}, {"0.weight", "2.weight"}),
}


@pytest.mark.parametrize("model", HIDDEN_OF)
def test_muon_takes_matrices_but_tables_and_the_head(model):
    build, config, expected = HIDDEN_OF[model]
    assert hidden_matrices(build(**config), MUON) == expected
    assert hidden_matrices(build(**config), Optimizer()) == frozenset()


def test_muon_without_a_matrix_to_train_is_refused():
    model = deep()
    for layer in model[:3]:
        layer.requires_grad_(False)
    with pytest.raises(InvalidConfiguration, match="Muon is for the matrices between embeddings and the last layer"):
        hidden_matrices(model, MUON)
