"""What the forward pass keeps for the backward pass: all of it, some of it, or elsewhere.

Recomputation: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Selective: the costly results (matrix
products and attention) are kept, the cheap ones computed anew (Korthikanti et al. 2022, section 5).
"""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from disttrain_api.training import ActivationCheckpointing
from disttrain_trainer.device import pins_memory
from disttrain_trainer.errors import InvalidConfiguration

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
    options = {} if what is ActivationCheckpointing.FULL else {"context_fn": _keep_costly}
    for layer in layers:
        layer.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, layer.forward, use_reentrant=False, **options
        )


def offload(device: torch.device, enabled: bool) -> AbstractContextManager[object]:
    """A forward pass inside keeps its activations in the host's memory."""
    return save_on_cpu(pin_memory=pins_memory(device)) if enabled else nullcontext()


def _keep_costly() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: object, operator: object, *arguments: object, **options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
