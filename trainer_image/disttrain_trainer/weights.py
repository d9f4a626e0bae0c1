"""A model's weights alone: out of a checkpoint into one safetensors file, and out of either into a model in any layout.

safetensors (https://huggingface.co/docs/safetensors) is imported where it is used: training does without it.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from disttrain_trainer.errors import CheckpointBroken, InvalidConfiguration
from disttrain_trainer.fit import names_of_all_ranks, require_model_fits, stored_shapes
from disttrain_trainer.mesh import World
from disttrain_trainer.object_path import location
from disttrain_trainer.soundness import flaw_of, lone_flaw_of
from disttrain_trainer.step_manifest import Place
from disttrain_trainer.step_reader import StepReader, load
from disttrain_trainer.step_writer import METADATA_FILE
from disttrain_trainer.storage import steps_in

SUFFIX = ".safetensors"


class _LoneFile(FileSystem):
    """A folder that holds nothing but one file."""

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(path)]


class SafetensorsReader(HuggingFaceStorageReader):
    """Reads one safetensors file; each rank only the part that it holds."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self.fs = _LoneFile()


def weights_at(path: Place) -> Place:
    """`path` itself where it is a safetensors file or a checkpoint, else the latest checkpoint in it.

    Raises InvalidConfiguration where it is nothing of the kind.
    """
    if (path.suffix == SUFFIX and isinstance(path, Path) and path.is_file()) or (path / METADATA_FILE).is_file():
        return path
    complete = steps_in(path).look().complete if path.is_dir() else []
    if not complete:
        raise InvalidConfiguration(f"{path} is neither a {SUFFIX} file on this machine nor holds a complete checkpoint")
    return path / complete[-1].name


def load_weights(module: nn.Module, path: Place, world: World) -> Place:
    """Load weights into a model, whole or cut; returns where they were. Called by all ranks together.

    Numbers are converted to the model's format. Raises InvalidConfiguration, CheckpointBroken, or CheckpointMismatch
    naming the first parameter that does not fit.
    """
    source = location(world.from_first(lambda: str(weights_at(path)), str))
    is_file = source.suffix == SUFFIX
    flaw = None if is_file else flaw_of(source, world)
    if flaw is not None:
        raise CheckpointBroken(f"`training.checkpoint.initialFrom`: {flaw}; name another checkpoint")
    reader = SafetensorsReader(source) if is_file else StepReader(source)
    weights = get_model_state_dict(module)
    there = stored_shapes(reader.read_metadata(), "" if is_file else "model.")
    names, advice = (
        names_of_all_ranks(weights, world),
        "name weights of this model in `training.checkpoint.initialFrom`",
    )
    world.all_or_none(lambda: require_model_fits(there, weights, names, source, advice))
    load(weights if is_file else {"model": weights}, reader, source, world)
    set_model_state_dict(module, weights)
    return source


def export_weights(path: Place, target: Path) -> list[str]:
    """Write the model of a checkpoint, of whatever layout, into one safetensors file, in a process of its own.

    Returns the names of what a model holds besides tensors, which is left out. Needs memory for the whole model.
    Raises InvalidConfiguration, CheckpointBroken or OSError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    source = weights_at(path)
    flaw = lone_flaw_of(source)
    if flaw is not None:
        raise CheckpointBroken(f"{flaw}; export another checkpoint")
    reader = StepReader(source)
    metadata = reader.read_metadata()
    shapes = stored_shapes(metadata, "model.")
    stored = {name: metadata.state_dict_metadata[f"model.{name}"] for name in shapes}
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load({"model": weights}, reader, source)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        # "format" tells other readers that these are torch's.
        save_file(weights, temporary, metadata={"format": "pt"})
        temporary.replace(target)
    except SafetensorError as error:
        raise OSError(f"{target} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return sorted(name for name, shape in shapes.items() if shape is None)
