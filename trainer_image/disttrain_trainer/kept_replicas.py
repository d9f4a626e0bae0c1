"""Replicas that train alone, in a checkpoint: of each rank its own, and the momentum of all.

What a checkpoint holds as model and optimizer is what they agree on, so any other layout or mode can go on from it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from disttrain_trainer.kept_gradients import room_for
from disttrain_trainer.mesh import World
from disttrain_trainer.report import say
from disttrain_trainer.state import State
from disttrain_trainer.step_reader import StepReader, load

_OWN, _COMMON = "replicas", "block"
_MARK = "steps"


@contextmanager
def agreed(state: State) -> Iterator[None]:
    """Inside, all replicas hold the model that is to be evaluated. A collective call."""
    if state.replicas is None:
        yield
        return
    with state.replicas.agreed(state.step):
        yield


@contextmanager
def saved_replica(state: State, rank: int) -> Iterator[dict[str, object]]:
    """Inside, the state is what all replicas agree on; gives the part of a checkpoint that holds what they do not.

    A collective call.
    """
    if state.replicas is None:
        yield {}
        return
    name = state.replicas.name
    with state.replicas.agreed(state.step, optimizer=True) as own:
        yield {
            _OWN: {str(rank): {name: {**own, _MARK: torch.tensor(state.step)}}},
            _COMMON: {name: dict(state.replicas.momentum)},
        }


def restore_replica(state: State, reader: StepReader, world: World) -> None:
    """Go on as this rank's replica in a checkpoint, whose model the state holds already.

    Of another mode or another number of replicas all begin with that model, and say so.
    """
    replicas = state.replicas
    if replicas is None:
        return
    own = _load(reader, (_OWN, str(world.rank), replicas.name), world)
    if _MARK not in own:
        say(world, f"{reader.place.name} holds no replicas of {replicas.name}: all begin with its model")
        replicas.set_out()
        return
    del own[_MARK]
    replicas.go_on(own, _load(reader, (_COMMON, replicas.name), world))


def _load(reader: StepReader, keys: tuple[str, ...], world: World) -> dict[str, Tensor]:
    """All tensors below `keys`; none where the checkpoint has nothing there."""
    room = room_for(reader.read_metadata(), ".".join([*keys, ""]))
    if room:
        contents: dict[str, object] = dict(room)
        for key in reversed(keys):
            contents = {key: contents}
        load(contents, reader, reader.place, world)
    return dict(room)
