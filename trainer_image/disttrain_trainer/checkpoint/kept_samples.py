"""Which training samples a checkpoint was written with: how many, and what some of them are (data/sketch.py).

Data may change between two attempts, and a job that continues another's run may have others: that is said, not refused.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from disttrain_trainer.checkpoint.kept_gradients import room_for
from disttrain_trainer.checkpoint.step_reader import StepReader, load
from disttrain_trainer.data.alike import are_drawn
from disttrain_trainer.data.sketch import Sketch, first_unlike, places_of
from disttrain_trainer.data.stream import Stream
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.errors import CheckpointBroken
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State

_PART, _TRAINING = "samples", "training"
_SKETCHES = TypeAdapter(list[Sketch | None])


def saved_sketches(state: State, world: World) -> dict[str, Any]:
    """The part of a checkpoint that holds them, from rank 0; empty where there are none."""
    if not (world.first and state.data.sketches):
        return {}
    data = bytearray(_SKETCHES.dump_json(list(state.data.sketches)))
    return {_PART: {_TRAINING: torch.frombuffer(data, dtype=torch.uint8)}}


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
