"""The Llama of the GPU's benchmark: its sizes, and that the trainer runs its job, here with a tiny one on a CPU."""

import pytest
import torch

from benchmarks import ranks
from benchmarks.gpu_gpt2 import Length, Measured
from benchmarks.gpu_llama import Shape, job, rows
from disttrain_api.builtin import model_config
from disttrain_api.jobconfig import JobConfig
from disttrain_trainer.models.transformers.config import library_config

transformers = pytest.importorskip("transformers")
TINY = Shape(2, 32, 64, 4, 2, 96, 16)


@pytest.mark.parametrize("shape", [Shape(), TINY])
def test_the_parameters_are_counted_as_the_library_has_them(shape):
    given = model_config(JobConfig.model_validate(job(shape, 2, Length.of(1), None)).training)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(library_config(given))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("float8", [None, "Rowwise"])
def test_the_trainer_runs_its_job(float8):
    if float8 is not None:
        pytest.importorskip("torchao")
    length = Length(1, 1, 2)
    described = job(TINY, 2, length, float8)
    # Compiling takes a minute.
    described["training"]["compile"] = False
    lines = ranks.train(described, 1)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["time_metrics/end_to_end(s)"] > 0 for line in lines)


def test_fp8_stands_beside_bf16():
    found = list(rows(Shape(), 4, "Rowwise", Measured(0.25, 30.0), Measured(0.5, 40.0), 989e12))
    assert [row.ratio for row in found] == [2.0, 2.0, 0.75]
    assert found[0].value == 4 * 2048 / 0.25
    assert [row.reference for row in rows(Shape(), 4, None, Measured(0.5, 40.0), None, 989e12)] == [None] * 3
