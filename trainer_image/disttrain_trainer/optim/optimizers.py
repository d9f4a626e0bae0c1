"""The optimizer that the manifest names."""

from collections.abc import Iterable, Mapping

import torch
from torch.nn import Parameter

from disttrain_api.training import Optimizer, OptimizerName
from disttrain_trainer.optim.groups import groups_of
from disttrain_trainer.runtime.device import fuses_updates


def build_optimizer(
    settings: Optimizer, parameters: Iterable[Parameter] | Mapping[str, Parameter]
) -> torch.optim.Optimizer:
    """SGD, Adam or AdamW of torch.optim at the peak rate; `step.py` sets the rate of each step.

    parameters: by name in the model where groups go by names.
    """
    named = parameters if isinstance(parameters, Mapping) else dict(enumerate(parameters))
    trained = {str(name): parameter for name, parameter in named.items() if parameter.requires_grad}
    groups = groups_of(settings, trained)
    # Offloaded parameters are on the CPU.
    fused = (
        all(fuses_updates(parameter.device) and parameter.is_floating_point() for parameter in trained.values()) or None
    )
    common = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay, "fused": fused}
    if settings.name is OptimizerName.SGD:
        return torch.optim.SGD(groups, momentum=settings.momentum or 0.0, nesterov=settings.nesterov or False, **common)
    kind = torch.optim.AdamW if settings.name is OptimizerName.ADAMW else torch.optim.Adam
    betas = (0.9 if settings.beta1 is None else settings.beta1, 0.999 if settings.beta2 is None else settings.beta2)
    return kind(groups, betas=betas, eps=settings.epsilon or 1e-8, **common)


def state_names(settings: Optimizer) -> tuple[str, ...]:
    """The tensors that the optimizer keeps of each parameter once it has made a step; `step` is one number."""
    if settings.name is OptimizerName.SGD:
        return ("momentum_buffer",) if settings.momentum else ()
    return ("step", "exp_avg", "exp_avg_sq")
