"""Expert parallelism: each rank of an expert group holds some of the experts, and tokens travel to them.

An expert group is a part of a shard x context x tensor block (torchtitan's mesh): experts need no ranks of their own,
and each rank goes on computing its own tokens through all other layers. Ranks of a block that hold the same experts cut
these up further among themselves with FSDP2, which also sums their gradients, over `replicate` groups too.
"""

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from disttrain_api.parallelism import Parallelism
from disttrain_trainer.moe.exchange import Exchange
from disttrain_trainer.moe.layer import RoutedExperts
from disttrain_trainer.moe.step import RoutingOfStep
from disttrain_trainer.parallel.shardable import naming_containers
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.local import local_part
from disttrain_trainer.runtime.mesh import World


def expert_layers(module: nn.Module) -> list[RoutedExperts]:
    """All layers with experts, in order of registration."""
    return [layer for layer in module.modules() if isinstance(layer, RoutedExperts)]


def watch_routing(module: nn.Module, world: World) -> RoutingOfStep:
    """Return what the model's layers with experts share in a step; unused in a model without experts.

    A collective call where they are in a pipeline.
    """
    layers = expert_layers(module)
    same_layers = _same_stages(world) if layers and world.mesh.pipeline > 1 else None
    pooled = next((layer.count for layer in layers if layer.pools_layers), 0)
    step = RoutingOfStep(len(layers), same_layers, world.mesh.context, pooled)
    for number, layer in enumerate(layers):
        layer.number, layer.step = number, step
    return step


def spread_experts(module: nn.Module, parallelism: Parallelism, world: World) -> DeviceMesh | None:
    """Leave this rank its part of the experts of each layer, in place; the mesh that they are spread over.

    None, and nothing is done, where the expert degree is 1.
    Raises InvalidConfiguration where the model has no experts, their number does not divide by the degree, or a process
    has several devices.
    """
    degree, layers = world.mesh.expert, expert_layers(module)
    if layers and (parallelism.devices_per_process or 1) > 1:
        raise InvalidConfiguration(
            f"`parallelism.devicesPerProcess`: the experts of the model {type(module).__name__} want a process per "
            "device; leave it out"
        )
    if degree == 1:
        return None
    if not layers:
        raise InvalidConfiguration(
            f"`parallelism.expertParallelDegree` {degree}: the model {type(module).__name__} has no layer of "
            "disttrain_trainer.moe.layer.MixtureOfExperts whose experts could be spread; leave the degree out"
        )
    mesh = _mesh(world)
    names = {parameter: name for name, parameter in module.named_parameters()}
    tensor = world.device_mesh.get_group("tensor") if world.mesh.tensor > 1 else None
    for layer in layers:
        for owner, name, parameter in list(_parameters(layer.experts)):
            _require_rows(parameter, names[parameter], layer.count, degree)
            rows = parameter.detach().chunk(degree)[mesh.get_local_rank("expert")].clone()
            spread = DTensor.from_local(rows, mesh["expert"], [Shard(0)], run_check=False)
            setattr(owner, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
        layer.exchange = Exchange(mesh.get_group("expert"), tensor)
    return mesh


def shard_experts(
    module: nn.Module, spread_over: DeviceMesh, precision: MixedPrecisionPolicy, offload: OffloadPolicy, world: World,
    *, reshard_after_forward: bool,
) -> None:  # fmt: skip
    """Cut the experts of each rank over the ranks that hold the same ones, in place, before the rest is cut."""
    mesh = spread_over["replicate", "expert_shard"] if world.mesh.replicate > 1 else spread_over["expert_shard"]
    for layer in expert_layers(module):
        experts = layer.experts
        with naming_containers(experts):
            fully_shard(
                experts,
                mesh=mesh,
                shard_placement_fn=lambda parameter: Shard(_cut(parameter, world.mesh.expert_shard)),
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=reshard_after_forward,
            )
        assert isinstance(experts, FSDPModule)
        # A rank's experts have had the tokens of its whole expert group: the mean is that over all ranks with tokens of
        # their own, which is not the size of this mesh. FSDP2 sums here (of a mesh of one rank it would divide twice by
        # another factor, and gloo cannot scale while it sums), and the hook divides.
        experts.set_gradient_divide_factor(1.0)
        experts.set_force_sum_reduction_for_comms(True)
        experts.set_all_reduce_hook(lambda gradient: gradient.div_(world.parts))


def _same_stages(world: World) -> dist.ProcessGroup:
    """The ranks with this one's layers. Every rank makes every group, in the same order."""
    ranks = world.size // world.mesh.pipeline
    groups = [dist.new_group(range(first, first + ranks)) for first in range(0, world.size, ranks)]
    return groups[world.at["pipeline"]]


def _mesh(world: World) -> DeviceMesh:
    """The ranks in order, a block's cut into parts of `expert` neighbours; a collective call of the whole world."""
    at = world.mesh
    shape = {"pipeline": at.pipeline, "replicate": at.replicate, "expert_shard": at.expert_shard, "expert": at.expert}
    return init_device_mesh(world.device.kind, tuple(shape.values()), mesh_dim_names=tuple(shape))


def _parameters(experts: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for owner in experts.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            yield owner, name, parameter


def _require_rows(parameter: nn.Parameter, name: str, count: int, degree: int) -> None:
    if parameter.dim() == 0 or len(parameter) != count:
        raise InvalidConfiguration(
            f"`parallelism.expertParallelDegree`: parameter `{name}` has shape {list(parameter.shape)}, expected a row "
            f"for each of the {count} experts"
        )
    if count % degree:
        raise InvalidConfiguration(
            f"`parallelism.expertParallelDegree`: {count} experts (parameter `{name}`) must be a multiple of {degree}"
        )


def _cut(parameter: nn.Parameter, ranks: int) -> int:
    """The dimension that `ranks` ranks cut an expert group's part along: one that divides, the experts' if it does."""
    local = local_part(parameter)
    return next((dimension for dimension, size in enumerate(local.shape) if size % ranks == 0), 0)
