"""What the GPU's benchmark counts, and what it does where there is no GPU."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu_gpt2 import NO_GPU, Shape, job, peak_flops
from disttrain_api.builtin import model_config
from disttrain_api.jobconfig import JobConfig
from disttrain_trainer.models.gpt.model import build
from disttrain_trainer.runtime.config import resolve
from tests.cluster.paths import REPOSITORY

SHAPES = [Shape(), Shape(layers=2, heads=2, width=16, tokens=8, vocabulary=11)]


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_the_models_but_positions(shape):
    training = JobConfig.model_validate(job(shape, micro=2, steps=1)).training
    with torch.device("meta"):
        model = build(model_config(training))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert shape.parameters == numbers - model.embeddings.positions.weight.numel()


def test_gpt2_takes_855_million_operations_per_token():
    assert Shape().flops_per_token == 6 * 123_689_472 + 12 * 12 * 768 * 1024 == 855_383_040


def test_its_jobs_are_ones_that_the_trainer_takes():
    described = JobConfig.model_validate(job(Shape(), micro=16, steps=50))
    _, batch = resolve(described, world_size=1)
    assert (batch.micro, described.training.steps) == (16, 70)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", None), ("NVIDIA T4", None)],
)
def test_only_known_gpus_have_a_peak(name, peak):
    assert peak_flops(name) == peak


@pytest.mark.parametrize("script", ["gpu_gpt2", "gpu_record"])
def test_without_a_gpu_it_says_so_and_ends_with_two(script, tmp_path):
    command = [sys.executable, str(REPOSITORY / "benchmarks" / f"{script}.py")]
    command += ["--folder", str(tmp_path / "docs")] if script == "gpu_record" else ["--json", str(tmp_path / "rows")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == NO_GPU, done.stderr
    assert "torch.cuda.is_available() is false" in done.stderr
    assert list(tmp_path.iterdir()) == []
