"""Which training samples a checkpoint was written with: how many, what some of them are (data/sketch.py), and settings.

Data may change between two attempts, and a job that continues another's run may have others: that is said, not refused.
Settings that would mix what is trained on with what is held out, or move all samples, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from disttrain_trainer.checkpoint.kept_gradients import room_for
from disttrain_trainer.checkpoint.step_reader import StepReader, load
from disttrain_trainer.data.alike import are_drawn
from disttrain_trainer.data.sketch import Sketch, first_unlike, places_of
from disttrain_trainer.data.stream import Stream
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.errors import CheckpointBroken, CheckpointMismatch, shown
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State

_PART, _TRAINING, _SETTINGS = "samples", "training", "settings"
_SKETCHES = TypeAdapter(list[Sketch | None])
_NAMED = TypeAdapter(dict[str, int | float | str])
_NAME = "name"
_LEAK = "samples that were trained on would be held out, or held-out ones trained on"
_WHY = {
    "heldOutFraction": _LEAK,
    "splitSeed": _LEAK,
    "sequenceLength": "the position in the data counts samples of the former length, so another one, as for longer "
    "contexts late in training, is for a new job",
}


def saved_samples(state: State, world: World) -> dict[str, Any]:
    """Return the part of a checkpoint that holds sketches and settings, from rank 0; empty where there are none."""
    if not world.first:
        return {}
    found = {_TRAINING: _SKETCHES.dump_json(list(state.data.sketches))} if state.data.sketches else {}
    found |= {_SETTINGS: _NAMED.dump_json(dict(state.data.settings))} if state.data.settings else {}
    parts = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in found.items()}
    return {_PART: parts} if parts else {}


def require_same_settings(state: State, reader: StepReader, world: World) -> None:
    """Raise CheckpointMismatch where a setting of the same kind of data is another one now. All ranks together.

    Checkpoints of earlier versions have none. Raises CheckpointBroken for what is no settings.
    """
    world.from_first(lambda: _require_same_settings(state.data.settings, reader))


def log_changed_samples(state: State, written_with: int, reader: StepReader, world: World) -> None:
    """Say where the training samples are not those of the checkpoint, which had so many. All ranks together.

    Raises CheckpointBroken for what is no sketches.
    """
    name, size = reader.place.name, state.sampler.size
    if written_with != size:
        if size:
            log_first_rank(
                world,
                f"{name} was written with {written_with or 'iterated'} training samples, and there are {size} now: "
                "their order begins anew",
            )
        return
    changed = world.from_first(lambda: _first_changed(state, reader), int | None)
    if changed is not None:
        log_first_rank(
            world,
            f"{name} was written with other training samples: there are {size}, too, and sample {changed} is another "
            "one now; their order goes on where it stood",
        )


def _require_same_settings(own: Mapping[str, str | float], reader: StepReader) -> None:
    """Do so on rank 0."""
    data = room_for(reader.read_metadata(), f"{_PART}.").get(_SETTINGS)
    if data is None:
        return
    load({_PART: {_SETTINGS: data}}, reader, reader.place)
    try:
        stored = _NAMED.validate_json(data.numpy().tobytes())
    except ValidationError as error:
        raise CheckpointBroken(f"{reader.place}: what the settings of the data were cannot be read") from error
    if stored.get(_NAME) != own.get(_NAME):
        return
    for field, why in _WHY.items():
        if field in stored and field in own and stored[field] != own[field]:
            before = shown(str(stored[field]))
            raise CheckpointMismatch(
                f"{reader.place} was written with `training.data.config.{field}` {before}, and it is {own[field]} now: "
                f"{why}; set it to {before} again, or begin anew with the checkpoint's weights: "
                "`training.checkpoint.initialFrom` and another `training.checkpoint.folder`"
            )


def _first_changed(state: State, reader: StepReader) -> int | None:
    """On rank 0: the first sample that is known in both and another one now; None where there is none."""
    data = room_for(reader.read_metadata(), f"{_PART}.").get(_TRAINING)
    if data is None or not state.data.sketches or isinstance(state.data.training, Stream):
        return None
    load({_PART: {_TRAINING: data}}, reader, reader.place)
    try:
        stored = _SKETCHES.validate_json(data.numpy().tobytes())
    except (ValidationError, TypeError) as error:
        raise CheckpointBroken(f"{reader.place}: what the training samples were cannot be read") from error
    at = first_unlike(state.data.sketches, stored)
    if at is None or are_drawn(state.data):
        return None
    return places_of(len(state.data.training))[at]
