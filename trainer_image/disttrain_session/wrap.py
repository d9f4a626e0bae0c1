"""A model as the job's layout has it: replicated by DDP, or cut by FSDP2."""

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from disttrain_trainer.parallel.data_parallel import replicate
from disttrain_trainer.parallel.layers import layers_of
from disttrain_trainer.parallel.shardable import (
    called,
    make_contiguous,
    naming_containers,
    require_one_format,
    whole_parameters,
    without_tied,
)
from disttrain_trainer.parallel.sharded import shard_mesh
from disttrain_trainer.parallel.share import share
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World


def wrap(model: nn.Module, optimizers: Sequence[Optimizer], world: World) -> nn.Module:
    """Return the model on its device, with rank 0's parameters and buffers on all ranks, and wrapped.

    Optimizers that hold its parameters are given those that the wrapped model has. Raises ValueError for one that has
    made a step already, and InvalidConfiguration for a parameter that cannot be cut.
    """
    if any(optimizer.state for optimizer in optimizers):
        raise ValueError("the optimizer has made a step already: prepare it before the first one")
    before = dict(model.named_parameters())
    model.to(world.device.torch)
    make_contiguous(model)
    share((*model.parameters(), *model.buffers()))
    if world.mesh.shard > 1:
        _shard(model, world)
        wrapped = model
    else:
        wrapped = replicate(model, world)
    after = dict(model.named_parameters())
    _exchange(optimizers, {parameter: after[name] for name, parameter in before.items()})
    return wrapped


def _shard(model: nn.Module, world: World) -> None:
    """Cut it in place. Raises InvalidConfiguration for a parameter, or a container, that cannot be cut."""
    left = {parameter: name for name, parameter in model.named_parameters()}
    whole = whole_parameters(model)
    for parameter, name in left.items():
        if parameter in whole:
            raise InvalidConfiguration(
                f"the parameter `{name}` is a single number without a dimension, or none: shards cannot cut it; give it"
                " the shape [1], or use replicas"
            )
    units = [unit for unit in called(layers_of(model)) if unit is not model]
    for unit in (*without_tied(units, set()), model):
        require_one_format([unit], left)
        with naming_containers([unit]):
            fully_shard(unit, mesh=shard_mesh(world))


def _exchange(optimizers: Sequence[Optimizer], new: dict[nn.Parameter, nn.Parameter]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]
