"""The built-in gpt's attention can be computed by the flash kernel, and computes the same by it."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from disttrain_api.builtin import GptConfig
from disttrain_trainer.models.gpt.model import build
from disttrain_trainer.parallel.context.attention_blocks import Flash, Plain, kernel_for
from tests.unit.trainer.test_attention_blocks import require_blocks_add_up

pytestmark = pytest.mark.gpu_only

CONFIG = GptConfig(layers=2, heads=12, width=768, sequence_length=256, vocabulary_size=512)


def loss_and_gradient(backend: SDPBackend) -> tuple[float, torch.Tensor]:
    torch.manual_seed(0)
    model = build(CONFIG).cuda()
    tokens = torch.randint(512, (4, 257), device="cuda")
    with sdpa_kernel(backend):
        with torch.autocast("cuda", torch.bfloat16):
            outputs = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(outputs.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    return loss.item(), model.blocks[0].attention.query.weight.grad


@pytest.mark.gpu_path("flash attention")
def test_flash_alone_is_allowed_and_agrees_with_plain_matrix_products():
    # Restricted to one kernel, torch raises where that one cannot be used.
    flash, flash_gradient = loss_and_gradient(SDPBackend.FLASH_ATTENTION)
    plain, plain_gradient = loss_and_gradient(SDPBackend.MATH)
    assert flash == pytest.approx(plain, rel=1e-3)
    distance = torch.linalg.vector_norm(flash_gradient - plain_gradient)
    assert distance <= 0.05 * torch.linalg.vector_norm(plain_gradient)
    assert plain_gradient.abs().sum() > 0


@pytest.mark.gpu_path("context parallelism")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_blocks_of_ring_attention_add_up_in_the_flash_kernel(dtype):
    assert kernel_for(torch.zeros(2, 3, 6, 64, dtype=dtype, device="cuda")) is Flash
    require_blocks_add_up(Flash, dtype, "cuda", width=64)


@pytest.mark.gpu_path("context parallelism")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_blocks_of_ring_attention_in_other_formats_are_matrix_products(dtype):
    assert kernel_for(torch.zeros(2, 3, 6, 64, dtype=dtype, device="cuda")) is Plain
    require_blocks_add_up(Plain, dtype, "cuda", width=64)
