"""Positions of iterable data sets in a checkpoint: one per replica, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disttrain_trainer.checkpoint.kept_gradients import room_for
from disttrain_trainer.checkpoint.step_manifest import Place
from disttrain_trainer.checkpoint.step_reader import StepReader, load
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.data.stream import Stream, StreamSampler
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.errors import CheckpointBroken, CheckpointMismatch, one_line
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.plain import from_bytes, to_bytes
from disttrain_trainer.runtime.randomness import keeping_random_state
from disttrain_trainer.state import State

_PART = "data"


def saved_position(state: State, world: World) -> dict[str, Any]:
    """The part of a checkpoint that holds it; empty where data are not iterated."""
    stream, sampler = state.data.training, state.sampler
    if not (isinstance(stream, Stream) and isinstance(sampler, StreamSampler) and world.counts_replica):
        return {}
    return {_PART: {str(world.replica): to_bytes(stream.position_before(sampler.number(state.cursor)))}}


def restore_position(state: State, reader: StepReader, world: World) -> None:
    """Go on where the checkpoint's data stood. All ranks together.

    Raises CheckpointMismatch for another number of replicas where the data set does not take their positions together,
    and for a position that it does not take.
    """
    stream, sampler = state.data.training, state.sampler
    if not (isinstance(stream, Stream) and isinstance(sampler, StreamSampler)):
        return
    path = reader.place
    room = room_for(reader.read_metadata(), f"{_PART}.")
    if not room:
        log_first_rank(world, f"{path.name} holds no position of data that are iterated: they begin anew")
        state.cursor = Cursor()
        return
    names = [str(replica) for replica in range(len(room))]
    as_many = len(room) == world.replicas
    # A global batch of another size may end where not each replica has read as many samples.
    if room.keys() != set(names) or not (
        as_many or (stream.joins_positions and state.cursor.position % world.replicas == 0)
    ):
        raise CheckpointMismatch(
            f"{path} holds positions of {len(room)} parts of the data, and here are {world.replicas} replicas: go on "
            "with as many, or begin the data anew with the checkpoint's weights: `training.checkpoint.initialFrom` and "
            "another `training.checkpoint.folder`"
        )
    wanted = {name: room[name] for name in ([str(world.replica)] if as_many else names)}
    load({_PART: wanted}, reader, path, world)
    parts = list(wanted.values())
    world.all_or_none(lambda: _resume(stream, sampler.number(state.cursor), parts, path, as_many=as_many))


def _resume(stream: Stream, number: int, parts: Sequence[Any], path: Place, *, as_many: bool) -> None:
    try:
        positions = [from_bytes(part) for part in parts]
    except ValueError as error:
        raise CheckpointBroken(f"{path}: the position of the data cannot be read: {error}") from error
    try:
        with keeping_random_state():
            if as_many:
                stream.resume(number, positions[0])
            else:
                stream.resume_from_parts(number, positions)
    except Exception as error:
        raise CheckpointMismatch(
            f"{path}: {stream.place}: load_state_dict raised {type(error).__name__}: {one_line(error)}; go on with "
            "the data that wrote it, or use another `training.checkpoint.folder`"
        ) from error
