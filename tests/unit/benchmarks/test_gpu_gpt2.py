"""What the GPU's benchmark counts, and what it does where there is no GPU."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu_gpt2 import NO_GPU, Length, Shape, job
from benchmarks.gpu_plain_loop import Gpt
from disttrain_api.builtin import model_config
from disttrain_api.jobconfig import JobConfig
from disttrain_trainer.models.gpt.model import build
from disttrain_trainer.runtime.config import resolve
from tools.cluster.paths import REPOSITORY

SHAPES = [Shape(), Shape(layers=2, heads=2, width=16, tokens=8, vocabulary=11)]


def test_its_jobs_are_ones_that_the_trainer_takes():
    described = JobConfig.model_validate(job(Shape(), 16, 8, Length.of(8)))
    _, batch = resolve(described, world_size=1)
    assert (batch.micro, batch.world, described.training.steps) == (16, 128, 14)


def test_the_plain_loops_model_is_the_trainers():
    shape = SHAPES[1]
    training = JobConfig.model_validate(job(shape, 2, 1, Length.of(1))).training
    own, plain = build(model_config(training)), Gpt(11, 8, 2, 2, 16)
    embeddings, head = own.embeddings, own.head
    pairs = [
        (plain.tokens, embeddings.tokens.weight),
        (plain.positions, embeddings.positions.weight),
        (plain.norm, head.norm.weight),
    ]
    for copy, block in zip(plain.blocks, own.blocks, strict=True):
        attention, (expand, _, contract) = block.attention, block.feed_forward
        projection = torch.cat([part.weight for part in (attention.query, attention.key, attention.value)])
        pairs += [(copy.norm1, block.norm1.weight), (copy.projection, projection), (copy.out, attention.out.weight)]
        pairs += [(copy.norm2, block.norm2.weight), (copy.expand, expand.weight), (copy.contract, contract.weight)]
    with torch.no_grad():
        for layer, weight in pairs:
            layer.weight.copy_(weight)
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (own, plain)]
    assert sizes[0] == sizes[1]
    inputs, targets = torch.randint(11, (2, 3, 8), generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.cross_entropy(own(inputs).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(plain(inputs, targets), expected)


@pytest.mark.parametrize("script", ["gpu_gpt2", "gpu_record"])
def test_without_a_gpu_it_says_so_and_ends_with_two(script, tmp_path):
    command = [sys.executable, str(REPOSITORY / "benchmarks" / f"{script}.py")]
    command += ["--folder", str(tmp_path / "docs")] if script == "gpu_record" else ["--json", str(tmp_path / "rows")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == NO_GPU, done.stderr
    assert "torch.cuda.is_available() is false" in done.stderr
    assert list(tmp_path.iterdir()) == []
