"""What shards cannot take of a script's model is named by `prepare`, and what they can make fit is made to."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from disttrain_session import wrap as wrap_module
from disttrain_session.wrap import wrap
from disttrain_trainer.runtime.errors import InvalidConfiguration


@pytest.fixture
def world() -> Iterator[Any]:
    """This process as a shard group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    yield SimpleNamespace(
        mesh=SimpleNamespace(shard=2), device=SimpleNamespace(torch=torch.device("cpu")), device_mesh=mesh
    )
    dist.destroy_process_group()


class Held(nn.Module):
    """A layer in containers, the weights of which lie in columns, and another parameter."""

    def __init__(self, other: torch.Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"inner": nn.Linear(4, 4)})])
        self.blocks[0]["inner"].weight = nn.Parameter(torch.randn(4, 4).t())  # type: ignore[index]
        self.other = nn.Parameter(other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block["inner"](x)  # type: ignore[index]
        return x * self.other


def test_layers_in_containers_are_cut_and_weights_laid_out(world: Any) -> None:
    model = Held(torch.ones(4))
    expected = model(torch.eye(4)).detach()
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = wrap(model, [optimizer], world)
    assert [name for name, part in wrapped.named_modules() if isinstance(part, FSDPModule)] == ["", "blocks.0.inner"]
    found = wrapped(torch.eye(4))
    assert torch.equal(found.detach(), expected)
    found.sum().backward()
    assert all(one.grad is not None for group in optimizer.param_groups for one in group["params"])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.tensor(2.0), "the parameter `other` is a single number without a dimension, or none: shards cannot cut"),
        (torch.ones(0), "the parameter `other` is a single number without a dimension, or none: shards cannot cut it"),
        (torch.ones(4, dtype=torch.complex64), "the parameter `other` is complex64, and shards sum gradients of real"),
    ],
)
def test_what_cannot_be_cut_is_named(world: Any, other: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        wrap(Held(other), [], world)


class Chain(nn.ModuleList):
    """A container that can be called, which torch 2.11 does not cut."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def test_a_container_that_torch_does_not_cut_is_named(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(unit: nn.Module, **_: object) -> None:
        if isinstance(unit, Chain) or unit.in_features == 3:
            raise ValueError("fully_shard does not support containers that do not implement forward: ...")

    monkeypatch.setattr(wrap_module, "fully_shard", refusing)
    with pytest.raises(InvalidConfiguration, match=r"cannot cut Chain, an nn\.ModuleList with a forward of its own"):
        wrap(Chain([nn.Linear(4, 4)]), [], world)
    # For anything else it says nothing about containers.
    with pytest.raises(ValueError, match="fully_shard does not support containers"):
        wrap(nn.Linear(3, 4), [], world)
