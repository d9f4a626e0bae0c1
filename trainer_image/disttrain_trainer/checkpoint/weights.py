"""A model's weights alone: out of safetensors files or a checkpoint into a model in any layout.

safetensors (https://huggingface.co/docs/safetensors) is imported where it is used: training does without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from disttrain_trainer.checkpoint.adapter import ADAPTER_FILE, base_weights, is_adapter_folder
from disttrain_trainer.checkpoint.compatibility import (
    Shapes,
    extra_state_in,
    names_of_all_ranks,
    require_model_fits,
    stored_shapes,
)
from disttrain_trainer.checkpoint.file_part import FilePart
from disttrain_trainer.checkpoint.kept_extra_state import room_for_extra_state
from disttrain_trainer.checkpoint.safetensors_file import SUFFIX
from disttrain_trainer.checkpoint.safetensors_index import INDEX_FILE, MODEL_FILE, read_files
from disttrain_trainer.checkpoint.safetensors_reader import SafetensorsReader
from disttrain_trainer.checkpoint.step_manifest import Place
from disttrain_trainer.checkpoint.step_reader import StepReader, load
from disttrain_trainer.checkpoint.step_writer import METADATA_FILE
from disttrain_trainer.checkpoint.storage import steps_in
from disttrain_trainer.checkpoint.verify import flaw_of
from disttrain_trainer.parallel.tensor import shared_parameters
from disttrain_trainer.protocols import offered
from disttrain_trainer.runtime.errors import CheckpointBroken, InvalidConfiguration
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.object_path import location


def are_weights(place: Place) -> bool:
    """Whether `weights_at` has found safetensors files, not a checkpoint."""
    return place.suffix == SUFFIX or place.name == INDEX_FILE


def weights_at(path: Place) -> Place:
    """`path` itself where it is a safetensors file or a checkpoint, else the latest checkpoint in it, or the index or
    the only file of a folder that Hugging Face's libraries have written.

    Raises InvalidConfiguration where it is nothing of the kind.
    """
    try:
        if (path.suffix == SUFFIX and isinstance(path, Path) and path.is_file()) or (path / METADATA_FILE).is_file():
            return path
        complete = steps_in(path).look().complete if path.is_dir() else []
        written = [
            path / name for name in (INDEX_FILE, MODEL_FILE) if isinstance(path, Path) and (path / name).is_file()
        ]
    except OSError as error:
        if not isinstance(path, Path):
            raise
        raise InvalidConfiguration(f"{path} cannot be read: {error.strerror or error}") from error
    if written and not complete:
        return written[0]
    if not complete:
        raise InvalidConfiguration(
            f"{path} is neither a {SUFFIX} file on this machine nor holds {INDEX_FILE} or a complete checkpoint"
        )
    return path / complete[-1].name


def load_weights(module: nn.Module, path: Place, world: World) -> str:
    """Load weights into a model, whole or cut; returns where they were. Called by all ranks together.

    The folder of an adapter stands for it and for the model that it adapts. Numbers are converted to the model's
    format. Raises InvalidConfiguration, CheckpointBroken, or CheckpointMismatch naming the first parameter that does
    not fit.
    """
    if not world.from_first(lambda: is_adapter_folder(path), bool):
        return str(_load(module, path, world))
    assert isinstance(path, Path)
    base = _load(module, location(world.from_first(lambda: base_weights(module, path), str)), world)
    _load(module, path / ADAPTER_FILE, world, adapter=True)
    return f"{base}, adapter from {path}"


def _load(module: nn.Module, path: Place, world: World, *, adapter: bool = False) -> Place:
    """adapter: of the model, only its adapters, which are all that stands there."""
    source = location(world.from_first(lambda: str(weights_at(path)), str))
    is_file = are_weights(source)
    if is_file:
        flaw = world.from_first(lambda: _flaw_of_file(source), str | None)
    elif (flaw := flaw_of(source, world)) is not None:
        flaw = f"{flaw}; name another checkpoint"
    if flaw is not None:
        raise CheckpointBroken(f"`training.checkpoint.initialFrom`: {flaw}")
    part_of = offered(module, "part_in_adapter" if adapter else "part_in_files") or FilePart
    reader = SafetensorsReader(source, part_of) if is_file else StepReader(source)
    weights = get_model_state_dict(module)
    metadata, prefix = reader.read_metadata(), "" if is_file else "model."
    there = stored_shapes(metadata, prefix)
    left_out = _tied(module, there) | _new(module, weights, there)
    names, advice = (
        names_of_all_ranks(weights, world),
        "name weights of this model in `training.checkpoint.initialFrom`",
    )
    left_out.update(extra_state_in(weights))
    if adapter:
        is_adapter = offered(module, "begins_without") or bool
        left_out |= {name for name in weights if not is_adapter(name)}
        names = {name for name in names if is_adapter(name)}
    wanted = {name: value for name, value in weights.items() if name not in left_out}
    extra = room_for_extra_state(weights, metadata, prefix)
    world.all_or_none(lambda: require_model_fits(there, wanted, names, source, advice))
    wanted |= extra
    load(wanted if is_file else {"model": wanted}, reader, source, world)
    set_model_state_dict(module, weights | wanted)
    return source


def _flaw_of_file(file: Path) -> str | None:
    try:
        read_files(file)
    except CheckpointBroken as error:
        return str(error)
    return None


def _tied(module: nn.Module, there: Shapes) -> set[str]:
    """Names of shared parameters that stand in the files under another of their names alone, as tied heads do."""
    shared = (set(names) for names in shared_parameters(module))
    return {name for names in shared if names & there.keys() for name in names - there.keys()}


def _new(module: nn.Module, weights: Mapping[str, Any], there: Shapes) -> set[str]:
    """Names that the model says may be absent, where all of them are: adapters of a model that had none."""
    absent = offered(module, "begins_without")
    if absent is None or any(absent(name) for name in there):
        return set()
    return {name for name in weights if absent(name)}
