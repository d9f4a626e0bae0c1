"""How numbers are computed: what each format sets, as far as a CPU can show it."""

from types import SimpleNamespace

import pytest
import torch

from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import Parallelism
from disttrain_api.training import Training
from disttrain_trainer.optim.precision import build_precision
from disttrain_trainer.runtime.device import Device

ALONE = SimpleNamespace(device=Device(torch.device("cpu"), "gloo"), mesh=Mesh.of(Parallelism(), 1))


@pytest.fixture
def torchs_own():
    before = torch.get_float32_matmul_precision()
    yield before
    torch.set_float32_matmul_precision(before)


def built(precision):
    training = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "steps": 1, "precision": precision}
    return build_precision(Training.model_validate(training), ALONE)


@pytest.mark.parametrize(
    ("precision", "number_format", "products"),
    [
        ("FP32", None, "highest"),
        ("TF32", None, "high"),
        ("BF16", torch.bfloat16, "highest"),
        ("FP16", torch.float16, "highest"),
    ],
)
def test_a_format_sets_autocast_and_how_products_are_rounded(torchs_own, precision, number_format, products):
    # What another job of this process has left counts for nothing.
    torch.set_float32_matmul_precision("medium")
    assert built(precision).format is number_format
    assert torch.get_float32_matmul_precision() == products
    assert built(precision).may_overflow is (precision == "FP16")


def test_fp32_is_torchs_default(torchs_own):
    built("FP32")
    assert torch.get_float32_matmul_precision() == torchs_own == "highest"
