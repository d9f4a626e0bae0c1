"""Whether stored weights are those of this model."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from disttrain_trainer.checkpoint.step_manifest import Place
from disttrain_trainer.runtime.errors import CheckpointMismatch, shown
from disttrain_trainer.runtime.mesh import World

Shapes = Mapping[str, Sequence[int] | None]
_EXTRA_STATE = "_extra_state"


def stored_shapes(metadata: Metadata, prefix: str) -> Shapes:
    """Shape of each entry whose name begins with `prefix`, by the rest of its name; None for what is no tensor."""
    return {
        name.removeprefix(prefix): tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix)
    }


def names_of_all_ranks(weights: Mapping[str, Any], world: World) -> Collection[str]:
    """Names of a model's parameters and buffers: ranks of a pipeline hold different ones. A collective call there."""
    return set(weights) if world.mesh.pipeline == 1 else set().union(*world.gather(set(weights), set[str]))


def extra_state_in(names: Iterable[str]) -> list[str]:
    """Return the names of modules' extra state, which always fits."""
    return [name for name in names if name.rpartition(".")[2] == _EXTRA_STATE]


def require_model_fits(
    there: Shapes, here: Mapping[str, Any], names: Collection[str], path: Place, advice: str
) -> None:
    """Raises CheckpointMismatch naming the first parameter that is not alike at `path` and in this model.

    here: what this rank has of it, but for extra state; names: of what all ranks have.
    """
    for name, value in here.items():
        if name not in there:
            raise CheckpointMismatch(f"{path} is of another model: it has no parameter `{name}`; {advice}")
        shape = there[name]
        if shape is None and isinstance(value, Tensor):
            raise CheckpointMismatch(f"{path} is of another model: parameter `{name}` is no tensor there; {advice}")
        if shape is not None and tuple(shape) != tuple(value.shape):
            raise CheckpointMismatch(
                f"{path} is of another model: parameter `{name}` has shape {list(shape)} there and "
                f"{list(value.shape)} here; {advice}"
            )
    # Earlier versions took extra state apart where it was a dictionary.
    parts = tuple(f"{name}." for name in extra_state_in(names))
    for name in sorted(name for name in there.keys() - set(names) if not name.startswith(parts)):
        raise CheckpointMismatch(f"{path} is of another model: parameter `{shown(name)}` is unknown here; {advice}")
