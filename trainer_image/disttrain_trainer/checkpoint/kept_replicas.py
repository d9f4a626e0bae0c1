"""Replicas that train alone, in a checkpoint: of each rank its own, and the momentum of all.

What a checkpoint holds as model and optimizer is what they agree on, so any other layout or mode can go on from it.
"""

import torch
from torch import Tensor

from disttrain_trainer.checkpoint.kept_gradients import room_for
from disttrain_trainer.checkpoint.step_reader import StepReader, load
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State

_OWN, _COMMON = "replicas", "block"
_MARK = "steps"


def saved_replica(state: State, rank: int) -> dict[str, object]:
    """The part of a checkpoint that holds what replicas do not agree on; saved while the state is what they do
    (Replicas.agreed, with the optimizer's state)."""
    replicas = state.replicas
    if replicas is None:
        return {}
    assert replicas.own, "saved outside of Replicas.agreed"
    return {
        _OWN: {str(rank): {replicas.name: {**replicas.own, _MARK: torch.tensor(state.step)}}},
        _COMMON: {replicas.name: dict(replicas.momentum)},
    }


def restore_replica(state: State, reader: StepReader, world: World) -> None:
    """Go on as this rank's replica in a checkpoint, whose model the state holds already.

    If the checkpoint has another mode or number of replicas, all begin with that model, and say so.
    """
    replicas = state.replicas
    if replicas is None:
        return
    own = _load(reader, (_OWN, str(world.rank), replicas.name), world)
    if _MARK not in own:
        log_first_rank(world, f"{reader.place.name} holds no replicas of {replicas.name}: all begin with its model")
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
