"""A model as the job's layout has it: replicated by DDP, or cut by FSDP2."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from disttrain_trainer.parallel.data_parallel import replicate
from disttrain_trainer.parallel.units import layers_of
from disttrain_trainer.runtime.mesh import World


def wrap(model: nn.Module, optimizers: Sequence[Optimizer], world: World) -> nn.Module:
    """Return the model on its device, with rank 0's parameters and buffers on all ranks, and wrapped.

    Optimizers that hold its parameters are given those that the wrapped model has. Raises ValueError for one that has
    made a step already.
    """
    if any(optimizer.state for optimizer in optimizers):
        raise ValueError("the optimizer has made a step already: prepare it before the first one")
    before = dict(model.named_parameters())
    model.to(world.device.torch)
    _share(model)
    if world.mesh.shard > 1:
        _shard(model, world)
        wrapped = model
    else:
        wrapped = replicate(model, world)
    after = dict(model.named_parameters())
    _exchange(optimizers, {parameter: after[name] for name, parameter in before.items()})
    return wrapped


def _share(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, src=0)


def _shard(model: nn.Module, world: World) -> None:
    names = world.device_mesh.mesh_dim_names or ()
    mesh = world.device_mesh["replicate", "shard"] if "replicate" in names else world.device_mesh["shard"]
    owners: dict[nn.Parameter, int] = {}
    units = [unit for unit in layers_of(model) if next(unit.parameters(), None) is not None and unit is not model]
    for unit in units:
        for parameter in unit.parameters():
            owners[parameter] = owners.get(parameter, 0) + 1
    for unit in units:
        # A parameter that two layers share is left to the root, which gathers it for both.
        if all(owners[parameter] == 1 for parameter in unit.parameters()):
            fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _exchange(optimizers: Sequence[Optimizer], new: dict[nn.Parameter, nn.Parameter]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]
