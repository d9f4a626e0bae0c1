"""Weighted sums against torch's own means."""

import pytest
import torch
from torch.nn import functional

from disttrain_api.training import Loss
from disttrain_trainer.losses import IGNORED, build_loss, weight_of

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(8, 5, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(5, (8,), generator=GENERATOR)
TOKEN_LOGITS = torch.randn(4, 6, 5, generator=GENERATOR, dtype=torch.float64)
TOKENS = torch.randint(5, (4, 6), generator=GENERATOR)
ONES, SOME = torch.ones(8), torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])


def mean(loss, outputs, targets, weights):
    return (build_loss(loss).sum(outputs, targets, weights) / weight_of(targets, weights)).item()


@pytest.mark.parametrize("smoothing", [None, 0.1])
def test_cross_entropy_is_torchs_mean(smoothing):
    expected = functional.cross_entropy(LOGITS, CLASSES, label_smoothing=smoothing or 0.0)
    assert mean(Loss(label_smoothing=smoothing), LOGITS, CLASSES, ONES) == pytest.approx(expected.item())


def test_padding_does_not_count():
    expected = functional.cross_entropy(LOGITS[:5], CLASSES[:5])
    assert mean(Loss(), LOGITS, CLASSES, SOME) == pytest.approx(expected.item())


def test_ignored_tokens_do_not_count():
    targets = TOKENS.clone()
    targets[0, 2:] = targets[3, :] = IGNORED
    expected = functional.cross_entropy(TOKEN_LOGITS.flatten(0, 1), targets.flatten())
    assert mean(Loss(), TOKEN_LOGITS, targets, torch.ones(4)) == pytest.approx(expected.item())
    assert weight_of(targets, torch.ones(4)) == 24 - 4 - 6


def test_compiled_cross_entropy_is_the_plain_one():
    targets = TOKENS.clone()
    targets[0, 2:] = IGNORED
    found = []
    for compiled in (False, True):
        outputs = TOKEN_LOGITS.clone().requires_grad_()
        loss = build_loss(Loss(label_smoothing=0.1), compiled).sum(outputs, targets, torch.ones(4))
        loss.backward()
        found.append((loss.detach(), outputs.grad))
    for plain, one_kernel in zip(*found, strict=True):
        torch.testing.assert_close(one_kernel, plain, rtol=1e-12, atol=1e-14)
    assert found[0][1].abs().sum() > 0


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 5), (8, 2, 3)])
def test_squared_error_is_torchs_mean(shape):
    outputs, targets = torch.randn(2, *shape, generator=GENERATOR, dtype=torch.float64)
    expected = functional.mse_loss(outputs, targets)
    assert mean(Loss(name="MeanSquaredError"), outputs, targets, ONES) == pytest.approx(expected.item())


def test_squared_error_of_classes_is_that_of_one_hot_vectors():
    expected = functional.mse_loss(LOGITS, functional.one_hot(CLASSES, 5).double())
    assert mean(Loss(name="MeanSquaredError"), LOGITS, CLASSES, ONES) == pytest.approx(expected.item())
