"""Attention to some of the keys, merged with that to the others, is attention to all; so are the gradients."""

import pytest
import torch
from torch.nn import functional

from disttrain_trainer.parallel.context.attention_blocks import Block, OnCpu, Plain, kernel_for

SCALE = 0.3
# Numbers of 8 bits; sums of those are kept in 24.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.004}


def in_two_blocks(kernel, query, key, value, gradient):
    """Causal attention of six queries to six keys, and its gradients: two blocks on the diagonal, and that below."""
    head, tail = slice(3), slice(3, None)
    blocks = ((head, head, True), (tail, tail, True), (tail, head, False))
    found = [kernel.forward(query[:, :, q], key[:, :, k], value[:, :, k], SCALE, causal) for q, k, causal in blocks]
    lse = torch.cat([found[0].lse, torch.logaddexp(found[1].lse, found[2].lse)], 2)
    shares = [(block.lse - lse[:, :, q]).exp().unsqueeze(-1) for block, (q, _, _) in zip(found, blocks, strict=True)]
    out = torch.zeros_like(query, dtype=lse.dtype)
    for block, share, (q, _, _) in zip(found, shares, blocks, strict=True):
        out[:, :, q] += share * block.out
    out = out.to(query.dtype)
    sums = [torch.zeros_like(one) for one in (query, key, value)]
    for q, k, causal in blocks:
        parts = (one[:, :, rows].contiguous() for one, rows in ((gradient, q), (query, q), (key, k), (value, k)))
        whole = Block(out[:, :, q].contiguous(), lse[:, :, q].contiguous(), found[0].kept)
        added = kernel.backward(*parts, whole, SCALE, causal)
        for total, rows, one in zip(sums, (q, k, k), added, strict=True):
            total[:, :, rows] += one.to(total.dtype)
    return out, sums


def in_one(query, key, value, gradient):
    """The same by torch's own function."""
    inputs = [one.double().requires_grad_() for one in (query, key, value)]
    out = functional.scaled_dot_product_attention(*inputs, is_causal=True, scale=SCALE)
    return out, torch.autograd.grad(out, inputs, gradient.double())


def require_blocks_add_up(kernel, dtype, device="cpu", width=8):
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(2, 3, 6, width, dtype=torch.float64, generator=generator) for _ in range(4)]
    tensors = [one.to(device, dtype) for one in drawn]
    found, expected = in_two_blocks(kernel, *tensors), in_one(*tensors)
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert torch.linalg.vector_norm(one - other) <= TOLERANCES[dtype] * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kernel", [OnCpu, Plain], ids=lambda kernel: kernel.__name__)
def test_blocks_add_up(kernel, dtype):
    require_blocks_add_up(kernel, dtype)


def test_a_cpu_has_a_kernel_for_all_formats():
    assert {kernel_for(torch.zeros(1, 1, 2, 3, dtype=dtype)) for dtype in TOLERANCES} == {OnCpu}
