"""Data parallelism: every rank holds the model and a part of the batch; gradients are averaged over the replicas."""

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from disttrain_trainer.parallel.average import average
from disttrain_trainer.parallel.devices import Placed, Replicated
from disttrain_trainer.parallel.sharded import reduce_gradients
from disttrain_trainer.parallel.share import share
from disttrain_trainer.runtime.device import gpus_of
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.local import local_part
from disttrain_trainer.runtime.mesh import World

_KNOWN_TO_BACKENDS = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
"""Number formats that DDP can send."""
_UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
"""In torch's words, which are all there is: by their place among those that DDP sends."""
_MOST_NAMED = 5


def replicate(module: nn.Module, world: World, static_graph: bool = False) -> nn.Module:
    """Return the module with gradients averaged over the replicas (and, with context parallelism, over the parts of
    their sequences) in the backward pass; itself where nothing is to be averaged.

    With `find_unused_parameters`, models may leave parameters unused, and DDP keeps its first buckets (parameters in
    reverse order of registration). It costs a walk over the autograd graph and a small asynchronous all-reduce per
    step: `without_search` spares them. A static graph never has them.
    """
    if world.parts == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
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
        device_ids=None if _is_spread(module) else gpus_of(world.device.torch),
        process_group=group,
        find_unused_parameters=not static_graph,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
    )


def searches(model: nn.Module) -> bool:
    """Whether DDP searches each step's graph for unused parameters, and need not where there are none.

    A communication hook keeps what belongs to a bucket, and must see the same buckets in every step.
    """
    if not isinstance(model, DistributedDataParallel) or model._comm_hooks or _is_spread(model.module):
        return False
    return model.find_unused_parameters


def without_search(model: nn.Module) -> nn.Module:
    """Return the model as DDP runs it where every step uses every parameter (`require_all_used`)."""
    assert isinstance(model, DistributedDataParallel)
    return DistributedDataParallel(
        model.module,
        device_ids=model.device_ids,
        process_group=model.process_group,
        gradient_as_bucket_view=True,
        # All replicas hold the same already.
        init_sync=False,
    )


def passes_to_form_buckets(model: nn.Module) -> int:
    """Return how many passes before the first step let DDP form the buckets that it keeps: by the order of gradients.

    Another place in a bucket is another order of summation with three ranks or more: a resumed run would differ in the
    last bits from one that never stopped. A static graph counts the uses of each parameter in a pass of its own.
    """
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:
        return 0
    return 2 if model.static_graph else 1


def require_all_used(model: nn.Module) -> None:
    """Raise InvalidConfiguration where the last backward pass left out parameters for which DDP does not search.

    The other ranks may wait for their gradients: this rank must end.
    """
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model.static_graph:
        return
    try:
        model._check_reducer_finalized()
    except RuntimeError as error:
        sent = [
            name
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        ]
        found = _UNUSED.search(str(error))
        indices = [int(index) for index in found[1].split()] if found else []
        unused = ", ".join(f"`{sent[index]}`" for index in indices[:_MOST_NAMED])
        raise InvalidConfiguration(
            f"`training.model`: a step left {unused or 'parameters'} without a gradient, where all parameters had one "
            "before the first step: set `parallelism.dataParallel.findUnusedParameters: true`, with which steps may "
            "use different parameters"
        ) from error


def _is_spread(module: nn.Module) -> bool:
    """Whether the module is on several devices of this process."""
    return isinstance(module, Replicated | Placed)


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
    if world.mesh.of_parameters.replicate == 1:
        return 0
    group = world.device_mesh.get_group("replicate")
    return average([local_part(parameter.grad) for parameter in parameters if parameter.grad is not None], group)


def without_ddp(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, which computes the same without sharing buffers in every forward pass; else the
    model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def share_buffers(module: nn.Module, world: World) -> None:
    """Give every replica the buffers of the first one (running means and the like), as DDP does before each forward."""
    for axis in (name for name in world.device_mesh.mesh_dim_names or () if name in {"replicate", "shard"}):
        group = world.device_mesh.get_group(axis)
        if group.size() > 1:
            share(module.buffers(), group)
