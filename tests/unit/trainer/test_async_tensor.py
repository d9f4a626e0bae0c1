"""Compiled layers overlap what tensor groups send where they are to; what they compute, test_layouts.py shows."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import Parallelism
from disttrain_api.training import Training
from disttrain_trainer.parallel.layers import compile_layers, layers_of
from disttrain_trainer.parallel.tensor import share_layers
from disttrain_trainer.runtime.device import GLOO, NCCL, Device
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.tasks.supervised import build_model

GPT = {"layers": 2, "width": 16, "heads": 2, "vocabularySize": 32, "sequenceLength": 8}
TRAINING = Training.model_validate({"model": {"name": "gpt", "config": GPT}, "data": {"name": "text"}, "steps": 1})
GATHERS, SCATTERS = "symm_mem.fused_all_gather_matmul", "symm_mem.fused_matmul_reduce_scatter"


@pytest.fixture
def world() -> Iterator[World]:
    """Rank 0 of two, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    yield World(0, 2, Device(torch.device("cpu"), GLOO), Mesh(tensor=2), mesh, dist.HashStore())
    torch._inductor.config._micro_pipeline_tp = False
    dist.destroy_process_group()


def code_of(model: nn.Module) -> str:
    """What is generated for a step of a compiled model."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        compile_layers(layers_of(model))
        _, code = run_and_get_code(lambda: model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward())
    return "".join(code)


@pytest.mark.parametrize("wanted", [True, False, None])
def test_products_wait_for_nothing_only_where_they_are_to(world: World, wanted: bool | None) -> None:
    if not dist.is_nccl_available():
        pytest.skip("this build of torch overlaps nothing")
    if wanted is None:
        # What another model of this process was to do is not this one's.
        share_layers(build_model(TRAINING), parallelism(True), world)
    model = build_model(TRAINING)
    share_layers(model, parallelism(wanted), world)
    code = code_of(model)
    assert "reduce_scatter" in code
    assert (GATHERS in code, SCATTERS in code) == (bool(wanted), bool(wanted))


def parallelism(wanted: bool | None) -> Parallelism:
    return Parallelism(tensor_parallel_degree=2, sequence_parallel=True, async_tensor_parallel=wanted)


class Gpus:
    """GPUs of which those in `reach` reach each other's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, reach: set[int]) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} <= reach)


def test_gpus_that_do_not_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 4, {0, 1, 2})
    assert not Device(torch.device("cuda:1"), NCCL).emulates_overlap(1, 2)
    assert not Device(torch.device("cuda:2"), NCCL).emulates_overlap(2, 3)
    with pytest.raises(InvalidConfiguration, match="GPU 2 does not reach the memory of GPU 3 of its tensor group"):
        Device(torch.device("cuda:2"), NCCL).emulates_overlap(0, 2)
    with pytest.raises(InvalidConfiguration, match="needs a GPU for each rank"):
        Device(torch.device("cuda:0"), GLOO).emulates_overlap(0, 2)


def test_who_sees_its_own_gpu_alone_asks_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 1, set())
    assert not Device(torch.device("cuda:0"), NCCL).emulates_overlap(1, 2)
