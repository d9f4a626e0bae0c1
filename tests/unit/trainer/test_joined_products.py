"""Products with several weights that a rank holds whole are one product."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain_api.builtin import GptConfig
from disttrain_api.jobconfig import JobConfig
from disttrain_api.mesh import Mesh
from disttrain_trainer.build import computes_whole, parallelise
from disttrain_trainer.models.gpt import model as gpt_model
from disttrain_trainer.runtime.device import Device
from tests.unit.trainer.worlds import job, small

LAYERS = 2
TOKENS = torch.arange(12).view(2, 6)


class Counting(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.counts[operation._schema.name] += 1
        return operation(*arguments, **(options or {}))


def built(*, bias: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    return gpt_model.build(GptConfig(vocabulary_size=16, layers=LAYERS, heads=2, width=8, sequence_length=8, bias=bias))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model.double()(TOKENS).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def products(model: torch.nn.Module) -> int:
    with Counting() as counting:
        model(TOKENS).sum().backward()
    return counting.counts["aten::mm"] + counting.counts["aten::addmm"]


def world_of(size: int, parallelism: dict[str, Any]) -> tuple[Any, Any]:
    parsed = JobConfig.model_validate(job(small(), parallelism=parallelism))
    device = Device(torch.device("cpu"), "gloo")
    world = SimpleNamespace(device=device, mesh=Mesh.of(parsed.parallelism, size), parts=1, size=size)
    return SimpleNamespace(job=parsed, training=parsed.training, builds_on_meta=False), world


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_has_the_gradients_of_three(bias):
    expected, model = gradients(built(bias=bias)), built(bias=bias)
    model.join_products()
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


def test_replicas_on_cpus_multiply_four_times_in_a_block_and_not_six_times():
    apart, (config, world) = built(), world_of(1, {})
    joined = parallelise(built(), config, world, None)
    # Queries, keys and values, output, two of the feed-forward part; the backward pass has two products for each.
    assert products(apart) == 3 * (6 * LAYERS + 1)
    assert products(joined) == 3 * (4 * LAYERS + 1)


def test_a_layer_with_a_hook_is_called():
    model, seen = built(), []
    model.join_products()
    model.blocks[1].attention.key.register_forward_hook(lambda *_: seen.append("key"))
    assert products(model) == 3 * (4 * LAYERS + 2 + 1)
    assert seen == ["key"]


def test_a_layer_of_another_class_is_called():
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0

    model = built()
    model.join_products()
    model.blocks[0].attention.value = Scaled(8, 8, bias=False)
    model.blocks[0].attention.out.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    seen: list[torch.Tensor] = []
    model(TOKENS)
    assert not seen[0].any()


@pytest.mark.parametrize(
    ("size", "parallelism", "expected"),
    [
        (1, {}, True),
        (2, {}, True),
        (2, {"tensorParallelDegree": 2}, False),
        (2, {"devicesPerProcess": 2, "deviceMode": "Replicate"}, False),
        (2, {"dataParallel": {"mode": "LocalSGD", "localSGD": {"period": 2}}}, False),
    ],
)
def test_products_are_joined_where_each_rank_holds_all_weights_as_they_were_made(size, parallelism, expected):
    config, world = world_of(size, parallelism)
    assert computes_whole(config, world) is expected


def test_products_on_gpus_stay_apart():
    config, world = world_of(1, {})
    world.device = Device(torch.device("cuda", 0), "nccl")
    assert not computes_whole(config, world)
