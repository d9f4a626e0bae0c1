"""A model's weights alone: out of a checkpoint into one safetensors file, and out of either into a model in any layout.

safetensors (https://huggingface.co/docs/safetensors) is imported where it is used: training does without it.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from disttrain_trainer.errors import CheckpointBroken, InvalidConfiguration, last_line
from disttrain_trainer.fit import names_of_all_ranks, require_model_fits, stored_shapes
from disttrain_trainer.mesh import World
from disttrain_trainer.object_path import location
from disttrain_trainer.safetensors_file import SafetensorsReader, read_tensors
from disttrain_trainer.soundness import flaw_of, lone_flaw_of
from disttrain_trainer.step_manifest import Place
from disttrain_trainer.step_reader import StepReader, load
from disttrain_trainer.step_writer import METADATA_FILE
from disttrain_trainer.storage import steps_in

SUFFIX = ".safetensors"
_INDEX_FILE = "model.safetensors.index.json"
"""Beside a model that Hugging Face's libraries have cut into several files."""


def weights_at(path: Place) -> Place:
    """`path` itself where it is a safetensors file or a checkpoint, else the latest checkpoint in it.

    Raises InvalidConfiguration where it is nothing of the kind.
    """
    try:
        if (path.suffix == SUFFIX and isinstance(path, Path) and path.is_file()) or (path / METADATA_FILE).is_file():
            return path
        complete = steps_in(path).look().complete if path.is_dir() else []
        in_parts = not complete and (path / _INDEX_FILE).is_file()
    except OSError as error:
        if not isinstance(path, Path):
            raise
        raise InvalidConfiguration(f"{path} cannot be read: {error.strerror or error}") from error
    if in_parts:
        raise InvalidConfiguration(
            f"{path} holds a model in several files ({_INDEX_FILE}), expected one {SUFFIX} file; join them into one"
        )
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
    if is_file:
        flaw = world.from_first(lambda: _flaw_of_file(source), str | None)
    elif (flaw := flaw_of(source, world)) is not None:
        flaw = f"{flaw}; name another checkpoint"
    if flaw is not None:
        raise CheckpointBroken(f"`training.checkpoint.initialFrom`: {flaw}")
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


def _flaw_of_file(file: Path) -> str | None:
    try:
        read_tensors(file)
    except CheckpointBroken as error:
        return str(error)
    return None


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
    try:
        load({"model": weights}, reader, source)
    except CheckpointException as failure:
        # The rest are CheckpointBroken.
        cause = next((cause for cause, _ in failure.failures.values()), failure)
        raise OSError(f"{source} cannot be read: {last_line(cause)}") from failure
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
