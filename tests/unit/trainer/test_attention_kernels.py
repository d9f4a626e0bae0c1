"""`training.attention`: the kernel that computes attention, and what is said where it cannot."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.profiler import profile

from disttrain_api.compute import Attention, Precision
from disttrain_trainer.parallel.context.attention_blocks import OnCpu, Plain, kernel_for
from disttrain_trainer.runtime.device import GLOO, NCCL, Device, allow_attention
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.layouts import CONTEXT
from tests.unit.trainer.worlds import job, run_cases, run_ranks, small, user

MATH, FLASH = "aten::_scaled_dot_product_attention_math", "aten::_scaled_dot_product_flash_attention_for_cpu"
CPU, GPU = Device(torch.device("cpu"), GLOO), Device(torch.device("cuda", 0), NCCL)
GPT = {"vocabularySize": 16, "sequenceLength": 8}
DATA = {"name": "synthetic", "config": {"kind": "Tokens", "sequenceLength": 8, "vocabularySize": 16, "size": 32}}


@pytest.fixture(autouse=True)
def _all_kernels_again() -> Iterator[None]:
    yield
    allow_attention(None)


@pytest.mark.parametrize(("kernel", "operator", "block"), [("Flash", FLASH, OnCpu), ("Math", MATH, Plain)])
def test_no_other_kernel_computes_attention(kernel: str, operator: str, block: type) -> None:
    CPU.use_attention(Attention(kernel), Precision.FP32)
    query = torch.randn(1, 2, 8, 4)
    with profile() as traced:
        functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert {event.key for event in traced.key_averages()} & {MATH, FLASH} == {operator}
    assert kernel_for(query) is block, "also on a ring"


@pytest.mark.parametrize(
    ("device", "kernel", "precision", "why"),
    [
        (CPU, "CuDNN", "BF16", "`training.attention` CuDNN needs a GPU: a CPU has Flash and Math"),
        (CPU, "Efficient", "FP32", "`training.attention` Efficient needs a GPU"),
        (GPU, "Flash", "FP32", "computes in BF16 or FP16, and `training.precision` is FP32: change it, or use Effic"),
        (GPU, "CuDNN", "TF32", "computes in BF16 or FP16, and `training.precision` is TF32"),
    ],
)
def test_what_a_device_does_not_have_is_refused(device: Device, kernel: str, precision: str, why: str) -> None:
    with pytest.raises(InvalidConfiguration, match=why):
        device.use_attention(Attention(kernel), Precision(precision))


@pytest.mark.parametrize("kernel", Attention)
def test_a_gpu_has_all_kernels_in_half_precision(kernel: Attention) -> None:
    GPU.use_attention(kernel, Precision.BF16)
    enabled = torch.backends.cuda
    found = {
        Attention.FLASH: enabled.flash_sdp_enabled(),
        Attention.CUDNN: enabled.cudnn_sdp_enabled(),
        Attention.EFFICIENT: enabled.mem_efficient_sdp_enabled(),
        Attention.MATH: enabled.math_sdp_enabled(),
    }
    assert [one for one, is_enabled in found.items() if is_enabled] == [kernel]


def training(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return small(model=model, data=DATA, **changes)


def test_every_kernel_learns_the_same_also_on_a_ring(tmp_path: Path) -> None:
    ring = {CONTEXT: 2, "contextParallelMethod": "Ring"}
    kernels: dict[str, dict[str, str]] = {"any": {}, "Flash": {"attention": "Flash"}, "Math": {"attention": "Math"}}
    cases = {
        f"{kernel} {name}": [{"training": training(user("double_gpt", **GPT), **changes), "parallelism": layout}]
        for kernel, changes in kernels.items()
        for name, layout in (("whole", {}), ("ring", ring))
    }
    found = run_cases(tmp_path, 2, cases)
    assert {name: result["errors"] for name, result in found.items()} == {name: [None] for name in cases}
    losses = {
        name: [line["loss_metrics/global_avg_loss"] for line in result["metrics"] if "grad_norm" in line]
        for name, result in found.items()
    }
    for one in losses.values():
        assert one == pytest.approx(losses["any whole"], rel=1e-10)


def test_the_trainer_computes_with_the_kernel_of_the_manifest(tmp_path: Path) -> None:
    settings = training({"name": "gpt", "config": GPT}, attention="Math", profiling={"firstStep": 2, "steps": 1})
    (rank,) = run_ranks(tmp_path, job(settings), DISTTRAIN_METRICS_DIR=str(tmp_path / "metrics"))
    assert rank.code == 0, rank.err
    (trace,) = (tmp_path / "metrics" / "profile").glob("*.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert names & {MATH, FLASH} == {MATH}


def test_a_model_that_the_kernel_does_not_compute_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    """torch's flash attention on a CPU has no dropout."""
    settings = training({"name": "gpt", "config": GPT | {"dropout": 0.5}}, attention="Flash")
    (rank,) = run_ranks(tmp_path, job(settings))
    assert rank.code == 80
    assert "`training.attention`: the kernel Flash does not compute this model's attention on this device" in rank.err
