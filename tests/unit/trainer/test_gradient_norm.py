"""The norm of a gradient that lies in pieces on many ranks; its values are held by test_equality.py."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from disttrain_trainer.metrics.results import SumOverRanks
from disttrain_trainer.parallel.gradient_norm import GradientNorm, norm_of_gradients, total_norm

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


@pytest.fixture
def norm_of_two_ranks():
    """Half of the square of 2 is on this rank; the gradient has changed since."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    norm = norm_of_gradients([parameter], WORLD)
    parameter.grad.zero_()
    return norm


def test_what_does_not_need_the_norm_sends_nothing(monkeypatch, norm_of_two_ranks):
    sent = []
    monkeypatch.setattr(dist, "all_reduce", lambda number, group: sent.append(group) or number.mul_(2))
    assert not sent
    assert float(norm_of_two_ranks()) == pytest.approx(2)
    assert float(norm_of_two_ranks()) == pytest.approx(2)
    assert sent == ["control"]


def test_norms_that_nothing_has_needed_are_summed_with_the_losses_of_a_line_of_the_log(norm_of_two_ranks):
    sent = []
    world = SimpleNamespace(sum_tensor=lambda numbers: sent.append(numbers) or 2 * numbers.double())
    norms = norm_of_two_ranks, GradientNorm(torch.tensor(3.0))
    results = [SimpleNamespace(loss=torch.tensor(0.25), gradient_norm=norm) for norm in norms]
    assert SumOverRanks(world).totals(results) == [(0.5, pytest.approx(2)), (0.5, 3.0)]
    assert len(sent) == 1
