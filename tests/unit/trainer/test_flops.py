"""Model FLOPs and the share of the device's peak that they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from disttrain_api.builtin import GptConfig
from disttrain_api.compute import Precision
from disttrain_trainer.metrics.flops import Work, peak_flops, utilisation, work_of
from disttrain_trainer.models.gpt.model import Gpt
from disttrain_trainer.runtime.device import Device
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.worlds import job, run_ranks

GPT2 = GptConfig(vocabulary_size=50304, layers=12, heads=12, width=768, sequence_length=1024)


def test_gpt2_needs_what_others_count_for_it() -> None:
    """nanoGPT's estimate_mfu: 6 x 123.65 M + 12 x 12 x 768 x 1024; here with the biases that it leaves out."""
    with torch.device("meta"):
        flops = Gpt(GPT2).flops_per_token()
    assert flops == pytest.approx(855.1e6, rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocabulary_size": 300},
        {"vocabulary_size": 300, "tie_weights": False},
        {"experts": 4, "experts_per_token": 1},
        {"experts": 4, "experts_per_token": 2},
    ],
)
def test_the_estimate_is_what_torch_counts(changes: dict[str, Any]) -> None:
    """Linear layers exactly, both ways; torch's counter knows no attention of CPUs, whose part is 4 T D a layer. In
    float64 experts are a product each, which it knows."""
    config = GptConfig(layers=2, heads=4, width=64, sequence_length=32, **changes)
    model, tokens = Gpt(config).double(), torch.zeros(3, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    names = {str(operator) for operator in counter.get_flop_counts()["Global"]}
    attention = 0 if any("attention" in name for name in names) else 3 * 4 * 2 * 32 * 64
    # Biases and norms are parameters, too, but no products of matrices: a part of a hundredth.
    assert model.flops_per_token() == pytest.approx(counter.get_total_flops() / tokens.numel() + attention, rel=0.015)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_are_those_of_data_sheets(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_a_cpu_has_no_peak() -> None:
    assert Device(torch.device("cpu"), "gloo").peak_flops(Precision.BF16) is None


def test_tf32_has_half_the_peak_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    device = Device(torch.device("cuda", 0), "cpu:gloo,cuda:nccl")
    assert [device.peak_flops(one) for one in (Precision.BF16, Precision.TF32)] == [989e12, 494.5e12]


def test_fp32_has_no_peak_on_any_device() -> None:
    assert Device(torch.device("cuda", 0), "cpu:gloo,cuda:nccl").peak_flops(Precision.FP32) is None


def test_utilisation_is_that_of_each_device() -> None:
    found = utilisation(989e12 * 4, seconds=2.0, devices=4, peak=989e12)
    assert found == {"tflops": pytest.approx(494.5), "mfu(%)": pytest.approx(50)}
    assert utilisation(3e12, 1.0, 3, None) == {"tflops": 1.0}
    assert utilisation(None, 1.0, 1, 989e12) == {}


def test_work_is_counted_in_what_the_model_says() -> None:
    assert Work(per_token=5).of(tokens=7, samples=1) == 35
    assert Work(per_token=5).of(tokens=None, samples=3) is None
    assert Work(per_sample=5).of(tokens=7, samples=3) == 15
    assert Work().of(tokens=7, samples=3) is None


class WithFlops(nn.Module):
    """A user's model that says what a sample costs."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def flops_per_sample(self) -> object:
        return self.answer


def test_any_model_may_say_what_it_costs() -> None:
    assert work_of(WithFlops(12)) == Work(per_sample=12.0)
    assert work_of(nn.Linear(2, 2)) == Work()


@pytest.mark.parametrize("answer", [0, -1.0, "12", None, float("nan")])
def test_an_answer_that_is_no_number_is_refused(answer: object) -> None:
    with pytest.raises(
        InvalidConfiguration, match=r"WithFlops\.flops_per_sample\(\) returned .*, expected a positive number"
    ):
        work_of(WithFlops(answer))


TEXT = {
    "model": {"name": "gpt", "config": {"layers": 1, "heads": 2, "width": 16}},
    "data": {"name": "synthetic", "config": {"kind": "Tokens", "size": 40, "sequenceLength": 8}},
    "steps": 3,
    "globalBatchSize": 8,
    "logging": {"interval": 1},
}


@pytest.mark.parametrize("parallelism", [{}, {"dataParallelShardDegree": 2}, {"tensorParallelDegree": 2}])
def test_lines_have_the_flops_of_each_rank(tmp_path: Path, parallelism: dict[str, int]) -> None:
    metrics = tmp_path / "metrics"
    ended = run_ranks(tmp_path, job(TEXT, parallelism=parallelism), 2, DISTTRAIN_METRICS_DIR=str(metrics))
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    lines = [json.loads(line) for line in (metrics / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "lr" in line]
    per_token = Gpt(GptConfig(layers=1, heads=2, width=16, sequence_length=8)).flops_per_token()
    for line in steps:
        assert line["tflops"] == pytest.approx(per_token * line["throughput(tps)"] / 1e12)
        assert "mfu(%)" not in line
    assert len(steps) == 3
    assert "tflops: " in ended[0].out
