"""The optimizer that the manifest names."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from disttrain_api.training import AdjustLrFn, Optimizer, OptimizerName
from disttrain_trainer.optim.groups import HIDDEN, groups_of
from disttrain_trainer.optim.muon import Muon
from disttrain_trainer.optim.own import named_optimizer
from disttrain_trainer.runtime.device import fuses_updates


def build_optimizer(
    settings: Optimizer, parameters: Iterable[Parameter] | Mapping[str, Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of torch.optim at the peak rate, or the user's own; `step.py` sets the rate of each step.

    parameters: by name in the model where groups go by names. Raises InvalidConfiguration, EntrypointNotImportable.
    """
    named = parameters if isinstance(parameters, Mapping) else dict(enumerate(parameters))
    trained = {str(name): parameter for name, parameter in named.items() if parameter.requires_grad}
    groups = groups_of(settings, trained)
    if settings.entrypoint is not None:
        return named_optimizer(settings, groups, trained)
    common = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.name is OptimizerName.ADAFACTOR:
        own = _given(beta2_decay=settings.beta2_decay, d=settings.d)
        return torch.optim.Adafactor(groups, **common, **own)
    updated = [parameter for parameter in trained.values() if not hasattr(parameter, HIDDEN)]
    fused = {"fused": _fuses(settings, updated) or None}
    momentum = _given(momentum=settings.momentum, nesterov=settings.nesterov)
    if settings.name is OptimizerName.SGD:
        return torch.optim.SGD(groups, **momentum, **common, **fused)
    betas = (0.9 if settings.beta1 is None else settings.beta1, 0.999 if settings.beta2 is None else settings.beta2)
    adam = {"betas": betas, "eps": settings.epsilon or 1e-8, **common, **fused}
    if settings.name is OptimizerName.MUON:
        adjust = _ADJUST[settings.adjust_lr_fn or AdjustLrFn.MATCH_RMS_ADAMW]
        return Muon(groups, {**momentum, **_given(ns_steps=settings.ns_steps), "adjust_lr_fn": adjust, **common}, adam)
    return (torch.optim.AdamW if settings.name is OptimizerName.ADAMW else torch.optim.Adam)(groups, **adam)


_ADJUST = {AdjustLrFn.ORIGINAL: "original", AdjustLrFn.MATCH_RMS_ADAMW: "match_rms_adamw"}
"""torch's names."""


def _given(**settings: Any) -> dict[str, Any]:
    """Those of them that are given; torch has defaults for the others."""
    return {name: value for name, value in settings.items() if value is not None}


def state_names(settings: Optimizer) -> tuple[str, ...]:
    """The tensors that a server's optimizer keeps of each parameter once it has made a step; `step` is one number."""
    if settings.name is OptimizerName.SGD:
        return ("momentum_buffer",) if settings.momentum else ()
    return ("step", "exp_avg", "exp_avg_sq")


def _fuses(settings: Optimizer, parameters: Collection[Parameter]) -> bool:
    if not all(fuses_updates(parameter.device) and parameter.is_floating_point() for parameter in parameters):
        return False
    if len({parameter.device.type for parameter in parameters}) > 1:
        return False
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    if settings.name is OptimizerName.SGD:
        # torch has none of what ranks hold parts of, nor where the first gradient of a parameter with momentum comes
        # later than that of another.
        return len(whole) == len(parameters) and not settings.momentum
    # Beside what ranks hold parts of, it takes single numbers alone.
    return len(whole) == len(parameters) or all(parameter.numel() == 1 for parameter in whole)
