"""Data parallelism: every rank holds the model and a part of the batch; gradients are averaged over the replicas."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from disttrain_trainer.parallel.average import average
from disttrain_trainer.parallel.devices import Placed, Replicated
from disttrain_trainer.parallel.sharded import reduce_gradients
from disttrain_trainer.parallel.share import share
from disttrain_trainer.runtime.device import gpus_of
from disttrain_trainer.runtime.mesh import World

_KNOWN_TO_BACKENDS = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
"""Number formats that DDP can send."""


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
    group = world.device_mesh.get_group("replicate")
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    unknown = {name: tensor for name, tensor in held.items() if tensor.dtype not in _KNOWN_TO_BACKENDS}
    if unknown:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(unknown))
        # As DDP does: once what is not trained, and buffers before each pass that changes them.
        share(unknown.values(), group)
        buffers = [name for name in unknown if not isinstance(unknown[name], nn.Parameter)]
        module.register_forward_pre_hook(
            lambda module, _: share(map(module.get_buffer, buffers), group) if module.training else None
        )
    return DistributedDataParallel(
        module,
        device_ids=None if spread else gpus_of(world.device.torch),
        process_group=group,
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
        if group.size() > 1:
            share(module.buffers(), group)
