"""Extra state of modules (`get_extra_state`) in a checkpoint: a tensor as one, all else as one plain value.

It comes back as it was stored, whatever a new module has in its place: its size and content may change while it trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from disttrain_trainer.checkpoint.compatibility import extra_state_in
from disttrain_trainer.checkpoint.plans import Whole
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.parallel.untouched import with_extra_state
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.plain import require_plain


def require_extra_state(module: nn.Module) -> None:
    """Raises InvalidConfiguration where some extra state could not come back from a checkpoint."""
    for one in with_extra_state([module]):
        kind = type(one).__name__
        if type(one).set_extra_state is nn.Module.set_extra_state:
            raise InvalidConfiguration(
                f"the model's {kind} has get_extra_state and no set_extra_state: what a checkpoint holds of it could "
                "not come back; give it both"
            )
        _require_plain(one.get_extra_state(), kind)


def take_extra_state(weights: dict[str, Any]) -> dict[str, Any]:
    """Take the extra state out of a model's state; return it as a checkpoint holds it. Raises InvalidConfiguration."""
    taken = {name: weights.pop(name) for name in extra_state_in(weights)}
    for name, value in taken.items():
        _require_plain(value, f"`{name.rpartition('.')[0]}`")
    return {name: value if isinstance(value, Tensor) else Whole(value) for name, value in taken.items()}


def of_this_rank(
    taken: Mapping[str, Any], module: nn.Module, stages: Iterable[nn.Module] | None, world: World
) -> dict[str, Any]:
    """Return the extra state that this rank writes: the first rank that computes a module writes it.

    stages: this rank's, in a pipeline, where it is a collective call; None elsewhere.
    """
    if stages is None or not taken:
        return dict(taken) if world.first else {}
    computed = {id(one) for stage in stages for one in stage.modules()}
    own = {name for name in taken if id(module.get_submodule(name.rpartition(".")[0])) in computed}
    everyone = world.gather(own, set[str])
    # What belongs to no stage, a container's, is alike everywhere.
    writer = {name: next((rank for rank, names in enumerate(everyone) if name in names), 0) for name in taken}
    return {name: value for name, value in taken.items() if writer[name] == world.rank}


def room_for_extra_state(names: Iterable[str], metadata: Metadata, prefix: str) -> dict[str, Any]:
    """Return the targets of loading, in the stored size; none for extra state that is not in the checkpoint."""
    room: dict[str, Any] = {}
    for name in extra_state_in(names):
        entry = metadata.state_dict_metadata.get(prefix + name)
        if isinstance(entry, TensorStorageMetadata):
            room[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        elif entry is not None:
            room[name] = None
    return room


def log_missing_extra_state(names: Iterable[str], room: Mapping[str, Any], checkpoint: str, world: World) -> None:
    """Name the modules whose extra state the checkpoint has not. names: of what all ranks have."""
    missing = sorted(name.rpartition(".")[0] or "the model" for name in extra_state_in(names) if name not in room)
    if missing:
        log_first_rank(world, f"{checkpoint} holds no extra state of {', '.join(missing)}: it begins anew")


def _require_plain(value: Any, whose: str) -> None:
    try:
        require_plain(value, f"get_extra_state() of the model's {whose}")
    except ValueError as error:
        raise InvalidConfiguration(str(error)) from error
