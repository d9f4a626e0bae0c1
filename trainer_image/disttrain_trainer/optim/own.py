"""An optimizer of the user's: from a task's method, or a class that `training.optimizer.entrypoint` names."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from disttrain_api.training import Optimizer
from disttrain_trainer.optim.groups import FACTOR
from disttrain_trainer.runtime.entrypoint import import_entrypoint
from disttrain_trainer.runtime.errors import InvalidConfiguration, one_line


def named_optimizer(
    settings: Optimizer, groups: list[dict[str, Any]], parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return what `entrypoint` makes of the groups. Raises InvalidConfiguration, EntrypointNotImportable."""
    assert settings.entrypoint is not None
    field = "training.optimizer"
    kind, where = import_entrypoint(field, settings.entrypoint), f"`{field}.entrypoint`: {settings.entrypoint}"
    given = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    try:
        inspect.signature(kind).bind(groups, **given)
    except TypeError as error:
        raise InvalidConfiguration(f"{where} does not take (params, lr, weight_decay): {error}") from error
    try:
        made = kind(groups, **given)
    except ValueError as error:
        # As those of torch.optim refuse what they cannot update.
        raise InvalidConfiguration(f"{where}: {one_line(error)}") from error
    return as_optimizer(where, made, parameters, settings.learning_rate)


def as_optimizer(
    where: str, returned: object, parameters: Mapping[str, nn.Parameter], peak_rate: float
) -> torch.optim.Optimizer:
    """Return what a user's code returned for these parameters, its groups' rates as parts of `peak_rate`.

    where: in the manifest and the code, for messages. Raises InvalidConfiguration where it is no optimizer of them.
    """
    if not isinstance(returned, torch.optim.Optimizer):
        raise InvalidConfiguration(f"{where} returned a {type(returned).__name__}, expected a torch.optim.Optimizer")
    held = {id(parameter) for group in returned.param_groups for parameter in group["params"]}
    wanted = {id(parameter): name for name, parameter in parameters.items()}
    if held != wanted.keys():
        missing = [name for key, name in wanted.items() if key not in held]
        what = f"one without {missing[0]}" if missing else "one of other parameters"
        raise InvalidConfiguration(f"{where} returned {what}, expected one of all the parameters that it was given")
    for group in returned.param_groups:
        group[FACTOR] = group.get(FACTOR, 1.0) * float(group["lr"]) / peak_rate
    return returned
