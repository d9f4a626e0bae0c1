"""Parameter groups: which parameters decay, and whose learning rate is a multiple of the others'."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch.nn import Parameter

from disttrain_api.training import Optimizer, WeightDecayOn
from disttrain_trainer.runtime.errors import InvalidConfiguration

FACTOR = "lr_factor"
"""Key of a group: its learning rate / that of the step. Absent: 1."""

STACKED = "stacked"
"""Attribute of a parameter that has a row per expert: what each expert has of it is one dimension less."""

HIDDEN = "hidden"
"""Attribute of a parameter that Muon updates, and key of a group of such ones."""


def groups_of(settings: Optimizer, parameters: Mapping[str, Parameter]) -> list[dict[str, Any]]:
    """The groups of torch.optim, in the order of their first parameters, which are given by name.

    Parameters that are cut in different ways are apart, too: torch's fused loops take no mixture.
    """
    found: dict[object, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        dimensions = parameter.dim() - hasattr(parameter, STACKED)
        decays = settings.weight_decay_on is WeightDecayOn.ALL or dimensions > 1
        factor = factor_of(settings, name)
        own = {} if decays else {"weight_decay": 0.0}
        own |= {} if factor == 1.0 else {FACTOR: factor}
        own |= {HIDDEN: True} if hasattr(parameter, HIDDEN) else {}
        kind = (getattr(parameter, "device_mesh", None), *own.items())
        found.setdefault(kind, {"params": [], **own})["params"].append(parameter)
    return list(found.values())


def factor_of(settings: Optimizer, name: str) -> float:
    """Learning rate of the parameter / that of the step: the first pattern that matches its name says."""
    return next((one.learning_rate_factor for one in settings.groups if fnmatchcase(name, one.pattern)), 1.0)


def require_matches(settings: Optimizer, names: Iterable[str]) -> None:
    """Raises InvalidConfiguration for a pattern that no parameter of the whole model matches."""
    known = list(names)
    for group in settings.groups:
        if not any(fnmatchcase(name, group.pattern) for name in known):
            shown = ", ".join(known[:5]) + (", …" if len(known) > 5 else "")
            raise InvalidConfiguration(
                f"`training.optimizer.groups`: no parameter matches the pattern '{group.pattern}'; the model has"
                f" {shown}"
            )
