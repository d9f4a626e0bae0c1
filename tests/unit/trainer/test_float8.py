"""Linear layers that multiply in FP8: which, in each layout alike, and what is refused. A CPU emulates the products."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from disttrain_api.compute import ActivationCheckpointing, Float8Recipe
from disttrain_trainer.data.sampler import permute
from disttrain_trainer.moe.experts import FeedForwardExperts
from disttrain_trainer.moe.layer import MixtureOfExperts
from disttrain_trainer.parallel.activations import recompute
from disttrain_trainer.parallel.float8 import linear_layers, multiply_in_float8
from disttrain_trainer.runtime.device import GLOO, NCCL, Device
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.randomness import seed_everything
from tests.suites import GATE
from tests.unit.trainer.comparisons import require_same, require_same_gradients, series
from tests.unit.trainer.user_code import double_gpt, double_tokens
from tests.unit.trainer.user_layers import of_layers
from tests.unit.trainer.worlds import run_cases, small, user

CPU = Device(torch.device("cpu"), GLOO)
PP = {"pipelineParallelDegree": 2}
LAYOUTS = {
    "fsdp": ({"dataParallelShardDegree": 2}, {}),
    "fsdp, recomputed": ({"dataParallelShardDegree": 2}, {"activationCheckpointing": "Full"}),
    "cp": ({"contextParallelDegree": 2, "contextParallelMethod": "Ring"}, {}),
    "pp": (PP, {}),
    "pp, ZBVZeroBubble": (PP | {"pipeline": {"schedule": "ZBVZeroBubble", "microbatches": 4}}, {}),
    "devices": ({"devicesPerProcess": 2}, {}),
}
TP = {"tensorParallelDegree": 2}
CUT = TP | {"sequenceParallel": True, "vocabularyParallel": True}
BESIDE_TENSOR = {
    "fsdp x tp": CUT | {"dataParallelShardDegree": 2},
    "pp x tp": CUT | PP,
    "cp x tp": CUT | {"contextParallelDegree": 2},
}
GPT = {"tieWeights": False, "width": 64, "heads": 4}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
# Models that round nothing but the factors of products in FP8.
EXACT = {
    "gpt": of_layers("exact_gpt", **GPT),
    "experts": of_layers("exact_gpt", experts=True, **GPT),
    **{name: of_layers("exact_transformers", family=name, **SIZES) for name in ("llama", "olmo2", "phi3")},
    "qwen3": of_layers("exact_transformers", family="qwen3", head_dim=16, **SIZES),
}
# Model, layout, changes of the training.
IN_TENSOR_GROUPS = {"gpt": ("gpt", CUT, {})}
if not GATE:
    IN_TENSOR_GROUPS |= {
        "gpt, compiled": ("gpt", CUT, {"compile": True}),
        "gpt, whole sequences, recomputed": ("gpt", TP, {"activationCheckpointing": "Full"}),
        **{name: (name, CUT, {}) for name in EXACT},
        "experts, spread": ("experts", CUT | {"expertParallelDegree": 2}, {}),
    }
SIZES_OF_GPT = {"double": False, "tieWeights": False, "width": 32, "layers": 4}
RECIPES = ("Rowwise", "Tensorwise")
STEPS = 4


def training(float8="Rowwise", **changes):
    gpt = user("double_gpt", **SIZES_OF_GPT)
    fields = {"float8": float8} if float8 else {}
    logged = {"precision": "BF16", "steps": STEPS, "logging": {"interval": 1}}
    return small(**{"model": gpt, "data": user("double_tokens")} | logged | fields | changes)


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    asked = asked_for("test_float8", "layout")
    cases = {
        name: {"training": training(**changes), "parallelism": layout}
        for name, (layout, changes) in LAYOUTS.items()
        if name in asked
    }
    cases |= {f"dp, {kind}": {"training": training(kind)} for kind in ("Rowwise", "Tensorwise", None)}
    shards = {"steps": 1, "globalBatchSize": 8, "microBatchSize": 4}
    cases |= {
        f"shards, {recipe}": {
            "training": training(recipe, **shards),
            "parallelism": {"dataParallelShardDegree": 2},
        }
        for recipe in asked_for("test_float8", "shards")
    }
    if "local SGD" in asked:
        alone = {"dataParallel": {"mode": "LocalSGD", "localSGD": {"period": 1}}}
        cases["local SGD"] = {"training": training(), "parallelism": alone}
    resumed = {"training": training()}
    runs = {name: [case] for name, case in cases.items()} | {"resumed": [resumed | {"stop_after": 2}, resumed]}
    return run_cases(tmp_path_factory.mktemp("float8"), 2, runs)


@pytest.mark.parametrize(("layout", "near"), [*((layout, 2**-6) for layout in LAYOUTS), ("local SGD", 2**-5)])
def test_layouts_compute_alike(results, layout, near):
    found, expected = results[layout], results["dp, Rowwise"]
    assert found["errors"] == [None]
    assert series(found) == pytest.approx(series(expected), rel=near)


@pytest.mark.parametrize("shards", RECIPES)
def test_the_gradients_of_shards_are_those_of_whole_layers_in_bf16(results, shards):
    """Layers that FSDP2 gathers compute in BF16, so that is what each rank's part of the batch is compared with: the
    scales of a rank's part of the weights would change gradients by some percent, as another batch does."""
    found = results[f"shards, {shards}"]
    assert found["errors"] == [None]
    require_same_gradients(found["gradients"], gradients_by_hand(shards), 2**-8)


def gradients_by_hand(recipe):
    """The mean over two ranks' samples of the first step, each of which the whole model computes in BF16."""
    seed_everything(0)
    model = double_gpt(**SIZES_OF_GPT).bfloat16()
    multiply_in_float8(model, Float8Recipe(recipe), CPU)
    samples = double_tokens()[0]
    sums = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    for numbers in permute(np.arange(8).reshape(2, 4), len(samples), 0, 0):
        inputs, targets = (torch.stack(part) for part in zip(*(samples[number] for number in numbers), strict=True))
        model.zero_grad()
        losses = functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten(), reduction="none")
        (losses.sum() / 64).backward()
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad.float()
    return sums


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    names = {model for model, *_ in IN_TENSOR_GROUPS.values()}
    cases = {(name, recipe): {"training": exact(recipe, name)} for name in names for recipe in RECIPES}
    return by_recipe(tmp_path_factory.mktemp("one"), 1, cases)


@pytest.fixture(scope="module")
def of_tensor_groups(tmp_path_factory):
    cases = {
        (name, recipe): {"training": exact(recipe, model, **changes), "parallelism": layout}
        for name, (model, layout, changes) in IN_TENSOR_GROUPS.items()
        for recipe in RECIPES
    }
    return by_recipe(tmp_path_factory.mktemp("groups"), 2, cases)


def exact(recipe, model, **changes):
    return training(recipe, model=EXACT[model], **changes) | {"steps": 1, "globalBatchSize": 8}


def by_recipe(folder, ranks, cases):
    found = run_cases(folder, ranks, {", ".join(key): [case] for key, case in cases.items()})
    return {key: found[", ".join(key)] for key in cases}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", IN_TENSOR_GROUPS)
def test_a_tensor_group_multiplies_what_one_process_does(of_one_process, of_tensor_groups, name, recipe):
    """Scales are those of whole tensors and rows, so FP8 rounds to the same: what differs is the order of sums in FP32.

    A number that lies between two of FP8 may still become the other one: of some ten thousand, none or a few. The scale
    of a rank's part would change gradients by some percent.
    """
    model, layout, _ = IN_TENSOR_GROUPS[name]
    found, expected = of_tensor_groups[name, recipe], of_one_process[model, recipe]
    assert found["errors"] == [None]
    if "expertParallelDegree" in layout:
        # FSDP2, which cuts the experts, computes them in BF16.
        assert series(found) == pytest.approx(series(expected), rel=2**-6)
        return
    assert series(found) == pytest.approx(series(expected), rel=2**-14)
    require_same_gradients(found["gradients"], expected["gradients"], 2**-8)


@pytest.fixture(scope="module")
def beside_tensor_groups(tmp_path_factory):
    cases = {
        (layout, recipe): {"training": training(recipe), "parallelism": degrees}
        for layout, degrees in BESIDE_TENSOR.items()
        for recipe in RECIPES
    }
    return by_recipe(tmp_path_factory.mktemp("beside"), 4, cases)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", BESIDE_TENSOR)
def test_tensor_groups_beside_other_degrees_compute_alike(results, beside_tensor_groups, layout, recipe):
    found = beside_tensor_groups[layout, recipe]
    assert found["errors"] == [None]
    assert series(found) == pytest.approx(series(results[f"dp, {recipe}"]), rel=2**-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_rounded_and_parameters_are_not(results, recipe):
    found, exact = results[f"dp, {recipe}"], results["dp, None"]
    assert series(found) != series(exact)
    assert series(found) == pytest.approx(series(exact), rel=2**-4)
    assert series(found)[-1] < series(found)[0]
    assert found["parameters"].keys() == exact["parameters"].keys()
    assert {value.dtype for value in found["parameters"].values()} == {torch.float32}


def test_the_recipes_are_two(results):
    assert series(results["dp, Rowwise"]) != series(results["dp, Tensorwise"])


def test_a_resumed_run_is_the_same(results):
    assert series(results["resumed"])[-2:] == series(results["dp, Rowwise"])[-2:]


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_that_are_emulated_are_those_of_torchs_own_kernel(monkeypatch, recipe):
    """torch's products sum in another order; a scale that is another one would change numbers by some percent."""

    def computed():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 32), nn.Linear(32, 16)).bfloat16()
        inputs = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        multiply_in_float8(model, Float8Recipe(recipe), CPU)
        outputs = model(inputs)
        outputs.float().pow(2).sum().backward()
        gradients = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
        return gradients | {"outputs": outputs.detach().float(), "inputs": inputs.grad.float()}

    emulated = computed()
    monkeypatch.setattr(Device, "emulates_float8", lambda *_: False)
    calls, own = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *given, **options: calls.append(1) or own(*given, **options))
    require_same(computed(), emulated, 2**-10)
    # Each of two layers has the product of the forward pass, and those of two gradients.
    assert len(calls) == 6


class Own(nn.Linear):
    """Computes something else, perhaps."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 24), nn.Linear(24, 32), Own(32, 32))
        self.experts = MixtureOfExperts(FeedForwardExperts(16, 32, 64), 16, 32)
        self.head = nn.Linear(32, 16)


def test_neither_the_last_layer_nor_routers_nor_odd_sizes_nor_layers_of_another_class():
    model = Model()
    assert linear_layers(model) == {"inner.0"}
    line = multiply_in_float8(model, Float8Recipe.ROWWISE, CPU)
    assert line == "1 linear layers multiply in FP8 (Rowwise, emulated on this CPU, which is slower than BF16)"
    assert [type(model.get_submodule(name)) is nn.Linear for name in ("inner.0", "inner.2", "head")] == [
        False, True, True,
    ]  # fmt: skip


def refusal(model, device=CPU, recipe=Float8Recipe.ROWWISE, degree=1):
    with pytest.raises(InvalidConfiguration) as refused:
        multiply_in_float8(model, recipe, device, degree)
    return str(refused.value)


def test_a_tensor_groups_ranks_have_multiples_of_16():
    assert linear_layers(nn.Sequential(nn.Linear(64, 32), nn.Linear(48, 64), nn.Linear(64, 48), nn.ReLU()), 2) == {"0"}
    assert refusal(Model(), degree=4) == (
        "`training.float8`: the model has no nn.Linear, except its last one, whose sizes are multiples of 16 x"
        " `parallelism.tensorParallelDegree` 4: remove the field"
    )


def test_a_model_without_such_layers_is_refused():
    assert "the model has no nn.Linear, except its last one, whose sizes are multiples of 16" in refusal(
        nn.Linear(16, 16)
    )


def test_an_image_without_torchao_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    assert "the package torchao is not in the image; install `disttrain[fp8]`" in refusal(Model())


@pytest.mark.parametrize(
    ("what", "again"),
    [
        (ActivationCheckpointing.NONE, False),
        (ActivationCheckpointing.SELECTIVE, False),
        (ActivationCheckpointing.FULL, True),
    ],
)
def test_products_that_are_not_emulated_are_kept_as_other_products(monkeypatch, what, again):
    """By `Selective`, whose operators name none in FP8: torchao's tensors come to the same ones."""
    products, multiply = [], torch._scaled_mm

    def noted(*factors, **options):
        products.append(1)
        return multiply(*factors, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model = nn.Sequential(block, nn.Linear(32, 32)).bfloat16()
    as_a_gpu = SimpleNamespace(emulates_float8=lambda recipe: False)
    assert multiply_in_float8(model, Float8Recipe.TENSORWISE, as_a_gpu).startswith("2 linear layers")
    recompute([block], what)
    model(torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    # Two layers: forward, and for both gradients.
    assert (len(products) > 2 * 3) is again


@pytest.mark.parametrize(
    ("recipe", "capability", "needed"),
    [
        ("Tensorwise", (8, 6), "8.9"),
        ("Rowwise", (8, 9), "9.0"),
        ("Tensorwise", (8, 9), None),
        ("Rowwise", (10, 0), None),
    ],
)
def test_a_gpu_without_such_products_is_refused(monkeypatch, recipe, capability, needed):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A10")
    device = Device(torch.device("cuda", 0), NCCL)
    if needed is None:
        assert device.emulates_float8(Float8Recipe(recipe)) is False
        return
    found = ".".join(map(str, capability))
    expected = f"{recipe} needs a GPU of compute capability {needed} or later, the A10 has {found}: remove it"
    assert expected in refusal(Model(), device, Float8Recipe(recipe))
