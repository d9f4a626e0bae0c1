"""The optimizer's state in a checkpoint: of each parameter what is kept of it, by name.

A parameter that no step has used yet has no state. The next attempt begins with fresh state of it, as this one would.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from disttrain_trainer.checkpoint.compatibility import Shapes
from disttrain_trainer.checkpoint.step_manifest import Place
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.errors import CheckpointMismatch
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State

OPTIMIZER = "optimizer"
_NAMED = 3
"""Parameters that a line names."""

Kept = dict[str, dict[str, Any]]
"""What is kept of each parameter."""


def saved_optimizer(state: State) -> Kept:
    """Return the optimizer state of the parameters that a step has used."""
    # torch would save an optimizer that has made no step as one that has.
    return optimizer_state_of(state) if state.optimizer.state else {}


def room_for_optimizer(state: State, there: Shapes, path: Place) -> Kept:
    """Return the targets of loading: the optimizer state of the parameters in the checkpoint.

    there: what the checkpoint holds. Raises CheckpointMismatch where it has some of a parameter's state and lacks some.
    """
    room, stored = optimizer_state_of(state), sorted(there)
    for parameter in [name for name, values in room.items() if not _fits(name, values, there, stored, path)]:
        del room[parameter]
    return room


def restore_optimizer(state: State, loaded: Kept) -> None:
    """Go on with what was loaded; all other parameters begin with fresh state."""
    groups = get_optimizer_state_dict(state.module, state.optimizer)["param_groups"]
    # Strict would be that all parameters have state.
    options = StateDictOptions(strict=False)
    contents = {"state": loaded, "param_groups": groups}
    set_optimizer_state_dict(state.module, state.optimizer, contents, options=options)


def log_fresh_parameters(state: State, loaded: Kept, path: Place, world: World) -> None:
    """Name the parameters that begin with fresh state, if any. A collective call where ranks hold different ones."""
    own = optimizer_state_of(state).keys() - loaded.keys()
    fresh = sorted(own if world.mesh.pipeline == 1 else set().union(*world.gather(own, set[str])))
    if fresh:
        named = ", ".join(fresh[:_NAMED]) + (f" and {len(fresh) - _NAMED} more" if len(fresh) > _NAMED else "")
        log_first_rank(
            world, f"{path.name} holds no state of the optimizer for {named}, which no step had used: it begins anew"
        )


def optimizer_state_of(state: State) -> Kept:
    """Return all that the optimizer keeps, begun with where no step was made."""
    kept: Any = get_optimizer_state_dict(state.module, state.optimizer)["state"]
    return kept


def _fits(parameter: str, values: Mapping[str, Any], there: Shapes, stored: list[str], path: Place) -> bool:
    """Whether the checkpoint has all of it; not where it has nothing. stored: the names that it has, in order."""
    flat, _ = flatten_state_dict({parameter: dict(values)})
    for name, value in flat.items():
        if name in there and (there[name] is not None) is isinstance(value, Tensor):
            continue
        first = bisect_left(stored, f"{parameter}.")
        if not (first < len(stored) and stored[first].startswith(f"{parameter}.")):
            return False
        raise CheckpointMismatch(
            f"{path} was written with another optimizer: it has no `{name.removeprefix(f'{parameter}.')}` of parameter "
            f"`{parameter}`; use the optimizer that wrote it, or another `training.checkpoint.folder`"
        )
    return True
