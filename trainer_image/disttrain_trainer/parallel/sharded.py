"""Sharded data parallelism: parameters, gradients and optimizer state are cut over the ranks, and copied over
`replicate` groups where there are any (FSDP2, after ZeRO stage 3, Rajbhandari et al. 2020; hybrid sharding).
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from disttrain_api.compute import Precision
from disttrain_api.training import Training
from disttrain_trainer.parallel.expert import shard_experts
from disttrain_trainer.parallel.shardable import (
    called,
    joined,
    make_contiguous,
    naming_containers,
    require_one_format,
    whole_parameters,
    without_tied,
)
from disttrain_trainer.runtime.device import pins_memory
from disttrain_trainer.runtime.mesh import World

_REDUCES = "reduces_over_replicas"
"""Attribute of a sharded model: what `reduce_gradients` was last told. Absent: True."""
HALVES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def is_sharded(training: Training, world: World) -> bool:
    """Whether gradients are reduced by FSDP2 rather than by DDP.

    Also where nothing is cut: layers that are shared by a tensor group are DTensors, which DDP does not take (a
    pipeline averages gradients itself), and offloading is FSDP2's.
    """
    mesh = world.mesh
    tensor = mesh.of_parameters.replicate > 1 and mesh.tensor > 1 and mesh.pipeline == 1
    return mesh.shard > 1 or mesh.expert > 1 or tensor or training.offload.parameters


def shard(
    module: nn.Module, units: list[nn.Module], training: Training, world: World, experts: DeviceMesh | None = None,
    *, in_turn: bool,
) -> nn.Module:  # fmt: skip
    """The module, its parameters cut over the shard group (in place).

    Each unit is gathered as a whole when it computes; what is in none of them belongs to the root. Where weights are
    cast, batch normalisations with running statistics are units that are not. Parameters that cannot be cut stay whole:
    `average_whole` averages their gradients. `experts` is the mesh that experts are spread over, if they are. in_turn:
    whether each forward pass calls all units, one after the other; small ones are then gathered with the next.
    Raises InvalidConfiguration for parameters that cannot be gathered together, and for what the installed torch does
    not cut.
    """
    half = HALVES.get(training.precision)
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=None if half is None else torch.float32)
    pinned = pins_memory(world.device.torch)
    offload = CPUOffloadPolicy(pin_memory=pinned) if training.offload.parameters else OffloadPolicy()
    mesh = shard_mesh(world)
    # With several microbatches under way, the backward pass of one leaves a stage's units gathered: to cut them up
    # after the next one's forward pass spares no memory, and a backward pass in two parts would not find its
    # parameters.
    reshard_after_forward = world.mesh.pipeline == 1
    make_contiguous(module)
    whole = whole_parameters(module)
    left = {parameter: name for name, parameter in module.named_parameters() if parameter not in whole}
    if experts is not None:
        shard_experts(module, experts, precision, offload, world, reshard_after_forward=reshard_after_forward)

    def cut(unit: list[nn.Module], policy: MixedPrecisionPolicy, reshard_after_forward: bool | None) -> None:
        require_one_format(unit, left)
        with naming_containers(unit):
            fully_shard(
                unit if len(unit) > 1 else unit[0],
                mesh=mesh,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=reshard_after_forward,
                ignored_params=whole or None,
            )

    norms = [layer for layer in module.modules() if _keeps_statistics(layer)] if half is not None else []
    for norm in without_tied(norms, whole):
        # Its kernels take halves beside whole weights and statistics, and not halves beside one of the two. It is so
        # small that it may stay gathered for the backward pass.
        cut([norm], MixedPrecisionPolicy(cast_forward_inputs=False), False)
    apart = without_tied([unit for unit in called(units) if unit not in norms], whole)
    # torch 2.11 casts the inputs of the first of several alone.
    for unit in joined(apart) if in_turn and half is None else ([unit] for unit in apart):
        cut(unit, precision, reshard_after_forward)
    cut([module], precision, None)
    return module


def reduce_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass reduces over the replicas, too.

    Over the shard group every one does: kept whole, the gradients would take the memory that sharding saves.
    """
    # It walks over all modules, as often as there are microbatches.
    if isinstance(model, FSDPModule) and getattr(model, _REDUCES, True) is not now:
        model.set_requires_all_reduce(now)
        setattr(model, _REDUCES, now)


def add_up_gradients(model: nn.Module) -> None:
    """Add gradients that came without those of the inputs to the ones before, in the format in which they are summed.

    FSDP2 does it when a unit's inputs get their gradients; what came later would be added in the parameters' format.
    """
    for group in parameter_groups(model):
        group.post_backward()


def parameter_groups(model: nn.Module) -> list[Any]:
    """Return FSDP2's groups of parameters that are gathered together."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return list(dict.fromkeys(state._fsdp_param_group for state in states if state._fsdp_param_group is not None))


def reshard(model: nn.Module) -> None:
    """Forget parameters that were gathered and are still there after a pass without gradients: they are to change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _keeps_statistics(layer: nn.Module) -> bool:
    """Whether it is a batch normalisation with weights and running statistics."""
    return isinstance(layer, _BatchNorm) and layer.affine and layer.track_running_stats


def shard_mesh(world: World) -> DeviceMesh:
    """The ranks that hold parts of the same layers, with the groups that hold copies of them if there are any."""
    names = world.device_mesh.mesh_dim_names or ()
    return world.device_mesh["replicate", "shard"] if "replicate" in names else world.device_mesh["shard"]
