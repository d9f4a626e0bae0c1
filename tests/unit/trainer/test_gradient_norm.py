"""The norm of a gradient that lies in pieces on many ranks; its values are held by test_equality.py."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from disttrain_trainer.parallel.gradient_norm import total_norm, total_norm_later

WORLD = SimpleNamespace(
    size=2, mesh=SimpleNamespace(pipeline=2), device=SimpleNamespace(torch=torch.device("cpu")), control="control"
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_rank_without_a_gradient_sends_a_number_as_wide_as_the_others_do(monkeypatch, dtype):
    """Ranks of a pipeline whose numbers have unlike widths abort."""
    sent = []
    monkeypatch.setattr(dist, "all_reduce", lambda number, **_: sent.append(number))
    frozen, trained = (nn.Linear(2, 2, dtype=dtype) for _ in range(2))
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    norms = [total_norm(layer.parameters(), WORLD) for layer in (frozen, trained)]
    assert norms[0] == 0
    assert norms[1].item() == pytest.approx(6**0.5)
    assert len({number.dtype for number in sent}) == 1


def test_what_does_not_need_the_norm_does_not_wait_for_the_other_ranks(monkeypatch):
    waited = []
    monkeypatch.setattr(dist, "all_reduce", lambda number, **_: SimpleNamespace(wait=lambda: waited.append(number)))
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    norm = total_norm_later([parameter], WORLD)
    parameter.grad.zero_()
    assert not waited
    assert norm() == 2
    assert waited
