"""Versions of weights: the right ones are used, and only those are copied that an update would overwrite."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from disttrain_trainer.parallel.pipedream.versions import Versions


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def update(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1.0)


def addresses(model: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_backward_pass_uses_the_weights_of_its_forward_pass(recomputed: bool) -> None:
    model, twin, x = module(), module(), torch.randn(5, 3, dtype=torch.float64)
    versions = Versions(model)
    with versions.using(0):
        loss = (checkpoint(model, x, use_reentrant=False) if recomputed else model(x)).square().sum()
    versions.make_room([0])
    update(list(model.parameters()))
    versions.updated()
    with versions.using(0):
        loss.backward()
    versions.take_gradients(0)
    twin(x).square().sum().backward()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected + 1.0)
        assert torch.equal(parameter.grad, expected.grad)


def test_each_version_computes_with_its_own_weights_until_it_is_dropped() -> None:
    model, x = module(), torch.randn(5, 3, dtype=torch.float64)
    versions, outputs = Versions(model), []
    for number in range(3):
        outputs.append(model(x).detach())
        versions.make_room(range(number + 1))
        update(list(model.parameters()))
        versions.updated()
    assert versions.count == 4
    assert versions.bytes() == 4 * versions.bytes_of_newest()
    for number, expected in enumerate(outputs):
        with versions.using(number):
            assert torch.equal(model(x), expected)
    versions.make_room([2])
    assert versions.count == 2
    with pytest.raises(KeyError, match=r"^0$"), versions.using(0):
        pass


def test_what_nobody_needs_is_updated_in_place() -> None:
    model = module()
    versions, before = Versions(model), addresses(model)
    with versions.using(0):
        assert addresses(model) == before
    versions.make_room([])
    assert addresses(model) == before
    versions.updated()
    versions.make_room([1])
    assert not set(addresses(model)) & set(before)


def test_the_module_holds_its_own_parameters_outside() -> None:
    model = module()
    own = list(model.parameters())
    versions = Versions(model)
    with versions.using(0):
        assert not any(found is parameter for found, parameter in zip(model.parameters(), own, strict=True))
    assert all(found is parameter for found, parameter in zip(model.parameters(), own, strict=True))


def test_gradients_of_several_versions_add_up_and_frozen_weights_stay_where_they_are() -> None:
    model, x = module(), torch.randn(5, 3, dtype=torch.float64)
    frozen = model[0].weight.requires_grad_(requires_grad=False)
    address = frozen.data_ptr()
    versions = Versions(model)
    with versions.using(0):
        first = model(x).sum()
    versions.make_room([0])
    update([parameter for parameter in model.parameters() if parameter.requires_grad])
    versions.updated()
    with versions.using(1):
        second = model(x).sum()
    gradients = []
    for number, loss in ((0, first), (1, second)):
        with versions.using(number):
            loss.backward()
            gradients.append(model[2].weight.grad.clone())
        versions.take_gradients(number)
    assert torch.equal(model[2].weight.grad, gradients[0] + gradients[1])
    assert frozen.grad is None
    assert frozen.data_ptr() == address


def test_a_shared_parameter_keeps_one_memory() -> None:
    """As within a stage of tied weights."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    versions = Versions(model)
    versions.make_room([0])
    with versions.using(0):
        assert model[0].weight is model[1].weight
    versions.updated()
    with versions.using(1):
        assert model[0].weight is model[1].weight
    assert versions.bytes() == 2 * versions.bytes_of_newest() == 2 * 4 * (9 + 3 + 3)
