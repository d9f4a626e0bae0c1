"""State of callbacks in a checkpoint: tensors by name, as those of a model; all else as bytes, from rank 0.

Tensors that are cut over ranks (DTensors) are saved part by part, and loaded into whatever layout there is now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from disttrain_trainer.callbacks import Callback
from disttrain_trainer.checkpoint.kept_gradients import room_for
from disttrain_trainer.checkpoint.step_manifest import Place
from disttrain_trainer.checkpoint.step_reader import StepReader, load
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.errors import CheckpointBroken, CheckpointMismatch, InvalidConfiguration, one_line
from disttrain_trainer.runtime.local import local_part
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.plain import from_bytes, require_plain, to_bytes
from disttrain_trainer.runtime.randomness import keeping_random_state
from disttrain_trainer.state import State

CALLBACKS, TENSORS, _VALUES = "callbacks", "tensors", "values"

Parts = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors by their keys, joined by slashes; and the state without them."""


def saved_callbacks(state: State, rank: int) -> dict[str, Any]:
    """The part of a checkpoint that holds their state; empty where none keeps any. Raises InvalidConfiguration."""
    kept = {one.name: _saved(one, rank) for one in state.callbacks.every if one.keeps_state}
    return {CALLBACKS: kept} if kept else {}


def restore_callbacks(state: State, reader: StepReader, world: World) -> None:
    """Give each callback its state in a checkpoint; one that is new there begins anew. All ranks together.

    Raises CheckpointMismatch for state that a callback does not take.
    """
    metadata = reader.read_metadata()
    for callback in state.callbacks.every:
        if not callback.keeps_state:
            continue
        room = _room(callback, metadata, world)
        if _VALUES not in room:
            log_first_rank(world, f"{reader.place.name} holds no state of {callback.name}: it begins anew")
            continue
        load({CALLBACKS: {callback.name: room}}, reader, reader.place, world)
        world.all_or_none(lambda callback=callback, room=room: restore_callback(callback, room, reader.place))  # type: ignore[misc]


def _saved(callback: Callback, rank: int) -> dict[str, Any]:
    tensors, values = _parts_of(callback)
    saved: dict[str, Any] = {TENSORS: tensors} if tensors else {}
    return saved | ({_VALUES: to_bytes(values)} if rank == 0 else {})


def _parts_of(callback: Callback) -> Parts:
    with keeping_random_state():
        state = callback.own.state_dict()
    place = f"`{callback.field}`: {callback.name}.state_dict()"
    if not isinstance(state, Mapping):
        raise InvalidConfiguration(f"{place} returned a {type(state).__name__}, expected a dictionary")
    tensors: dict[str, Tensor] = {}
    values = _without_tensors(dict(state), (), tensors)
    try:
        require_plain(values, place)
    except ValueError as error:
        raise InvalidConfiguration(str(error)) from error
    return tensors, values


def _without_tensors(state: dict[Any, Any], above: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[Any, Any]:
    """Return the state without the tensors in its dictionaries, which are put into `tensors`."""
    rest: dict[Any, Any] = {}
    for key, value in state.items():
        named = isinstance(key, str) and "/" not in key
        if named and isinstance(value, Tensor):
            tensors["/".join((*above, key))] = value.detach()
        elif named and type(value) is dict:
            rest[key] = _without_tensors(value, (*above, key), tensors)
        else:
            rest[key] = value
    return rest


def _room(callback: Callback, metadata: Metadata, world: World) -> dict[str, Any]:
    """Tensors for loading to write into: cut where the callback has a cut one of that name now.

    The ranks of a pipeline hold different layers: none is given what another one's callback alone has.
    """
    stored = room_for(metadata, f"{CALLBACKS}.{callback.name}.")
    here: dict[str, Tensor] = {}
    world.all_or_none(lambda: here.update(_parts_of(callback)[0]))
    everywhere = world.gather(set(here), set[str]) if world.mesh.pipeline > 1 else []
    others = set().union(*everywhere) - here.keys()
    tensors = {
        name: value
        for key, value in stored.items()
        if key != _VALUES and (name := key.removeprefix(f"{TENSORS}.")) not in others
    }
    values = {_VALUES: stored[_VALUES]} if _VALUES in stored else {}
    cut = {name: _like(here.get(name), value) for name, value in tensors.items()}
    return values | ({TENSORS: cut} if cut else {})


def _like(here: Tensor | None, stored: Tensor) -> Tensor:
    if isinstance(here, DTensor) and here.shape == stored.shape:
        return torch.empty_like(here, dtype=stored.dtype)
    return stored


def cut_as_here(callback: Callback, room: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of a callback with this rank's parts of tensors as parts of those that it has cut now."""
    here, _ = _parts_of(callback)
    tensors = {name: _as_part(here.get(name), value) for name, value in room.get(TENSORS, {}).items()}
    return {**room, TENSORS: tensors}


def _as_part(here: Tensor | None, part: Tensor) -> Tensor:
    if isinstance(here, DTensor) and local_part(here).shape == part.shape:
        cut = torch.empty_like(here, dtype=part.dtype)
        local_part(cut).copy_(part)
        return cut
    return part


def restore_callback(callback: Callback, room: Mapping[str, Any], path: Place | str) -> None:
    """Give a callback what `saved_callbacks` has of it. path: where that lies, for messages. Raises CheckpointMismatch,
    or CheckpointBroken."""
    try:
        state = from_bytes(room[_VALUES])
    except ValueError as error:
        raise CheckpointBroken(f"{path}: the state of {callback.name} cannot be read: {error}") from error
    for name, tensor in room.get(TENSORS, {}).items():
        *above, last = name.split("/")
        inner = state
        for key in above:
            inner = inner[key]
        inner[last] = tensor
    try:
        with keeping_random_state():
            callback.own.load_state_dict(state)
    except Exception as error:
        raise CheckpointMismatch(
            f"{path}: `{callback.field}`: {callback.name}.load_state_dict raised {type(error).__name__}: "
            f"{one_line(error)}; go on with the callback that wrote it, or use another `training.checkpoint.folder`"
        ) from error
