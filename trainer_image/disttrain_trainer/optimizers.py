"""The optimizer that the manifest names."""

from collections.abc import Iterable

import torch
from torch.nn import Parameter

from disttrain_api.training import Optimizer, OptimizerName
from disttrain_trainer.device import fuses_updates


def build_optimizer(settings: Optimizer, parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
    """SGD, Adam or AdamW of torch.optim at the peak rate; `step.py` sets the rate of each step."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = _alike(trained)
    # Offloaded parameters are on the CPU.
    fused = all(fuses_updates(parameter.device) and parameter.is_floating_point() for parameter in trained) or None
    common = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay, "fused": fused}
    if settings.name is OptimizerName.SGD:
        return torch.optim.SGD(groups, momentum=settings.momentum or 0.0, nesterov=settings.nesterov or False, **common)
    kind = torch.optim.AdamW if settings.name is OptimizerName.ADAMW else torch.optim.Adam
    betas = (0.9 if settings.beta1 is None else settings.beta1, 0.999 if settings.beta2 is None else settings.beta2)
    return kind(groups, betas=betas, eps=settings.epsilon or 1e-8, **common)


def _alike(parameters: list[Parameter]) -> list[dict[str, list[Parameter]]]:
    """A group for each way in which parameters are cut: torch's fused loops take no mixture."""
    groups: dict[object, list[Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": members} for members in groups.values()]


def state_names(settings: Optimizer) -> tuple[str, ...]:
    """The tensors that the optimizer keeps of each parameter once it has made a step; `step` is one number."""
    if settings.name is OptimizerName.SGD:
        return ("momentum_buffer",) if settings.momentum else ()
    return ("step", "exp_avg", "exp_avg_sq")
