"""Error feedback of gradient compression in a checkpoint: separate for each rank, like the random state."""

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from disttrain_trainer.checkpoint.step_reader import StepReader, load
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State

_PART = "gradients"
_MARK = "steps"


def kept_gradients(state: State, rank: int) -> dict[str, object]:
    """The part of a checkpoint that holds what this rank has kept; empty where nothing is kept."""
    kept = None if state.gradient_sum is None else state.gradient_sum.kept
    if state.gradient_sum is None or kept is None:
        return {}
    # The mark says that this way of summing wrote the checkpoint, also where it keeps nothing yet.
    return {_PART: {str(rank): {state.gradient_sum.name: {**kept, _MARK: torch.tensor(state.step)}}}}


def restore_kept_gradients(state: State, reader: StepReader, world: World) -> None:
    """Go on with what was kept in a checkpoint. A collective call.

    Another compression, another number of replicas or other parameters begin with nothing kept, and say so.
    """
    gradient_sum = state.gradient_sum
    if gradient_sum is None or gradient_sum.kept is None:
        return
    room = room_for(reader.read_metadata(), f"{_PART}.{world.rank}.{gradient_sum.name}.")
    # A larger world has ranks of which nothing was kept; all ranks load together, or none does.
    if not all(world.gather(_MARK in room and _fits(room, state), bool)):
        log_first_rank(
            world,
            f"{reader.place.name} holds nothing that {gradient_sum.name} has kept of these gradients: it begins anew",
        )
        return
    load({_PART: {str(world.rank): {gradient_sum.name: room}}}, reader, reader.place, world)
    del room[_MARK]
    gradient_sum.restore(room)


def _fits(kept: dict[str, Tensor], state: State) -> bool:
    """Return whether the stored error feedback, if any, belongs to the parameters that are trained now."""
    numbers = sum(values.numel() for name, values in kept.items() if name.startswith("residual/"))
    return numbers in (0, sum(parameter.numel() for parameter in state.parameters if parameter.requires_grad))


def room_for(metadata: Metadata, prefix: str) -> dict[str, Tensor]:
    """Tensors of the sizes and formats of all that is saved below `prefix`, for loading to write into."""
    return {
        name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
