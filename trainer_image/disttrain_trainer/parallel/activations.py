"""Activation checkpointing and offloading: which activations the forward pass keeps for the backward pass, and where.

Recomputation: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Selective: the costly results (matrix
products and attention) are kept, the cheap ones computed anew (Korthikanti et al. 2022, section 5).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from disttrain_api.compute import ActivationCheckpointing
from disttrain_trainer.runtime.device import pins_memory
from disttrain_trainer.runtime.errors import InvalidConfiguration

_Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
"""Around a layer's forward pass, and around that which is made anew."""
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
# FSDP2's hooks mark themselves for the profiler, more often in the backward pass; torch takes that for another model.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)


def require_layers(module: nn.Module, layers: Sequence[nn.Module], what: ActivationCheckpointing) -> None:
    """Raises InvalidConfiguration where there is nothing to compute anew: a whole model at once would keep as much."""
    if what is not ActivationCheckpointing.NONE and not layers:
        raise InvalidConfiguration(
            f"`training.activationCheckpointing` {what.value}: the model {type(module).__name__} shows no layers; hold"
            " them in an nn.Sequential or an nn.ModuleList, offer a method `layers()`, or leave it out"
        )


def recompute(layers: Sequence[nn.Module], what: ActivationCheckpointing) -> None:
    """Have each layer's activations computed anew in the backward pass, in place. Names of parameters stay."""
    if what is ActivationCheckpointing.NONE:
        return
    for layer in layers:
        options = {} if what is ActivationCheckpointing.FULL else {"context_fn": _keep_costly}
        counting = [one for one in layer.modules() if isinstance(one, _BatchNorm) and one.track_running_stats]
        if counting:
            options = {"context_fn": functools.partial(_count_once, counting, **options)}
        layer.forward = functools.partial(_recomputed, layer.forward, options)  # type: ignore[method-assign]


def _recomputed(
    forward: Callable[..., object], options: dict[str, Callable[[], _Contexts]], *inputs: object, **named: object
) -> object:
    """Return what `forward` does. A function of our own: torch compiles what it finds below `checkpoint` only from the
    frame that calls it, and a layer whose `forward` is `checkpoint` itself runs as if nothing was compiled."""
    return checkpoint(forward, *inputs, use_reentrant=False, **options, **named)


def compile_inside(layer: nn.Module) -> bool:
    """Compile what is computed anew as a whole, and not that it is; return whether the layer is such a one."""
    forward = layer.forward
    if not isinstance(forward, functools.partial) or forward.func is not _recomputed or forward.args[1]:
        return False
    inner, options = forward.args
    layer.forward = functools.partial(_recomputed, torch.compile(inner), options)  # type: ignore[method-assign]
    return True


def offload(device: torch.device, enabled: bool) -> AbstractContextManager[object]:
    """A forward pass inside keeps its activations in the host's memory."""
    return save_on_cpu(pin_memory=pins_memory(device)) if enabled else nullcontext()


def _count_once(layers: Sequence[_BatchNorm], context_fn: Callable[[], _Contexts] = noop_context_fn) -> _Contexts:
    """The contexts of `context_fn`; what is computed anew in the second does not enter the running statistics again."""
    first, second = context_fn()
    return first, _uncounted(layers, second)


@contextmanager
def _uncounted(layers: Sequence[_BatchNorm], around: AbstractContextManager[object]) -> Iterator[None]:
    # What is kept for the backward pass must be the same tensors, so statistics are updated, by nothing.
    before = [(layer, layer.momentum, layer.num_batches_tracked) for layer in layers]
    try:
        for layer in layers:
            layer.momentum, layer.num_batches_tracked = 0.0, None
        with around:
            yield
    finally:
        for layer, momentum, count in before:
            layer.momentum, layer.num_batches_tracked = momentum, count


def _keep_costly() -> _Contexts:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: object, operator: object, *arguments: object, **options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
