"""Data parallelism: every rank holds the model and a part of the batch; gradients are averaged over the replicas."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from disttrain_trainer.parallel.average import average
from disttrain_trainer.parallel.devices import Placed, Replicated
from disttrain_trainer.parallel.sharded import reduce_gradients
from disttrain_trainer.runtime.device import gpus_of
from disttrain_trainer.runtime.mesh import World


def replicate(module: nn.Module, world: World, static_graph: bool = False) -> nn.Module:
    """The module, its gradients averaged over the replicas during the backward pass; itself where there is one replica.

    DDP re-forms its buckets after the first step of a process, in the order in which gradients became ready. Another
    place in a bucket is another order of summation with three ranks or more, so a resumed run would differ in the last
    bits from one that never stopped. With `find_unused_parameters` DDP keeps the first buckets (parameters in reverse
    order of registration). It costs a walk over the autograd graph and a small asynchronous all-reduce per step, and
    lets models leave parameters unused. With a static graph two passes before the first step form the buckets instead
    (`has_buckets_to_form`).
    """
    spread = isinstance(module, Replicated | Placed)
    if world.replicas == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return DistributedDataParallel(
        module,
        device_ids=None if spread else gpus_of(world.device.torch),
        process_group=world.device_mesh.get_group("replicate"),
        find_unused_parameters=not static_graph,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
    )


def has_buckets_to_form(model: nn.Module) -> bool:
    """Whether DDP will form the buckets that it keeps after its first backward pass."""
    return isinstance(model, DistributedDataParallel) and model.static_graph


def synchronize_gradients(model: nn.Module, now: bool) -> AbstractContextManager[object]:
    """Forward and backward pass run inside; only with `now` are gradients averaged, those kept from before included."""
    reduce_gradients(model, now)
    if now or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def average_gradients(parameters: Iterable[nn.Parameter], world: World) -> int:
    """Average over the replicas what is already there, for backward passes that DDP does not see (pipelines).

    Returns the bytes that this rank sends for it, see `average`.
    """
    if world.mesh.replicate == 1:
        return 0
    group = world.device_mesh.get_group("replicate")
    return average([_local(parameter.grad) for parameter in parameters if parameter.grad is not None], group)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def without_ddp(model: nn.Module) -> nn.Module:
    """What DDP wraps, which computes the same without sharing buffers in every forward pass; else the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def share_buffers(module: nn.Module, world: World) -> None:
    """Give every replica the buffers of the first one (running means and the like), as DDP does before each forward."""
    for axis in (name for name in world.device_mesh.mesh_dim_names or () if name in {"replicate", "shard"}):
        group = world.device_mesh.get_group(axis)
        with torch.no_grad():
            for buffer in module.buffers():
                dist.broadcast(buffer, src=dist.get_global_rank(group, 0), group=group)
