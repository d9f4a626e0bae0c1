"""The scale of FP16's losses: falls where a gradient overflows, grows after many steps in which none did."""

import math

import pytest
import torch

from disttrain_trainer.optim.loss_scale import LossScaler


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.ones(3))


@pytest.fixture
def optimizer(weight):
    return torch.optim.SGD([weight], lr=1.0)


def test_gradients_get_their_true_size(weight, optimizer):
    scaler = LossScaler()
    (weight.sum() * scaler.scale).backward()
    without = torch.nn.Parameter(torch.ones(1))
    scaler.unscale([without])
    scaler.unscale([weight, without])
    assert weight.grad.tolist() == [1, 1, 1]
    scaler.step(optimizer, 3**0.5)
    assert weight.tolist() == [0, 0, 0]
    assert scaler.scale == 2**16


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_step_that_overflows_is_left_out_and_the_scale_falls(weight, optimizer, norm):
    scaler = LossScaler(steps=1999)
    weight.grad = torch.ones(3)
    scaler.step(optimizer, norm)
    assert weight.tolist() == [1, 1, 1]
    assert scaler == LossScaler(scale=2**15, steps=0)


def test_it_falls_to_one(weight, optimizer):
    """Red where a gradient that no scale makes finite goes on for a thousand steps, to a scale of 0, without a word."""
    scaler, found = LossScaler(), []
    weight.grad = torch.ones(3)
    while scaler.may_fall:
        scaler.step(optimizer, math.nan)
        found.append(scaler.scale)
    assert found == [2.0**power for power in range(15, -1, -1)]
    scaler.step(optimizer, math.nan)
    assert (scaler.scale, weight.tolist()) == (1, [1, 1, 1])


def test_it_grows_after_two_thousand_steps(weight, optimizer):
    scaler = LossScaler(scale=8.0, steps=1998)
    scaler.step(optimizer, 1.0)
    assert scaler == LossScaler(scale=8.0, steps=1999)
    scaler.step(optimizer, 1.0)
    assert scaler == LossScaler(scale=16.0, steps=0)


def test_a_scaler_of_torch_can_go_on_as_this_one():
    torchs = torch.amp.GradScaler("cpu", init_scale=4.0)
    torchs.load_state_dict(torchs.state_dict() | {"_growth_tracker": 7})
    scaler = LossScaler()
    scaler.load_state_dict(torchs.state_dict())
    assert scaler == LossScaler(scale=4.0, steps=7)
    assert scaler.state_dict().items() <= torchs.state_dict().items()
