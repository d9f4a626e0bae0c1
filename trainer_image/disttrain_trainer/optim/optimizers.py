"""The optimizer that the manifest names."""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from disttrain_api.training import Optimizer, OptimizerName
from disttrain_trainer.optim.groups import groups_of
from disttrain_trainer.optim.own import named_optimizer
from disttrain_trainer.runtime.device import fuses_updates


def build_optimizer(
    settings: Optimizer, parameters: Iterable[Parameter] | Mapping[str, Parameter]
) -> torch.optim.Optimizer:
    """SGD, Adam or AdamW of torch.optim at the peak rate, or the user's own; `step.py` sets the rate of each step.

    parameters: by name in the model where groups go by names. Raises InvalidConfiguration, EntrypointNotImportable.
    """
    named = parameters if isinstance(parameters, Mapping) else dict(enumerate(parameters))
    trained = {str(name): parameter for name, parameter in named.items() if parameter.requires_grad}
    groups = groups_of(settings, trained)
    if settings.entrypoint is not None:
        return named_optimizer(settings, groups, trained)
    fused = _fuses(settings.name, trained.values()) or None
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


def _fuses(name: OptimizerName, parameters: Collection[Parameter]) -> bool:
    # Offloaded parameters are on the CPU.
    if not all(fuses_updates(parameter.device) and parameter.is_floating_point() for parameter in parameters):
        return False
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    # Of what ranks hold parts of, torch has no fused SGD, and takes beside it single numbers alone.
    alike = len(whole) == len(parameters) or all(parameter.numel() == 1 for parameter in whole)
    return alike and (name is not OptimizerName.SGD or len(whole) == len(parameters))
