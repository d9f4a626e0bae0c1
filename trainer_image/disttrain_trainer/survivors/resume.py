"""How ranks that start again in their pods go on from the state of one that survived the failure before.

Every method is called by all ranks together. They say what lies in the memory of their pods, choose by the same rule
(choose.py), and all have it from one of them. Whatever does not fit, nothing was loaded: the checkpoint is next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from disttrain_trainer.checkpoint.checkpoints import restore_values
from disttrain_trainer.checkpoint.kept_callbacks import CALLBACKS, restore_callback
from disttrain_trainer.checkpoint.kept_optimizer import OPTIMIZER, optimizer_state_of, restore_optimizer
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import TrainerError, one_line
from disttrain_trainer.runtime.json_collectives import Form, form_of, receive, send
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.plain import from_bytes, to_bytes
from disttrain_trainer.runtime.randomness import restore_packed_random_state, seed_everything
from disttrain_trainer.state import State
from disttrain_trainer.survivors.choose import Choice, Offer, choose
from disttrain_trainer.survivors.memory import PodMemory
from disttrain_trainer.survivors.survivor import belongs

_REST = ""
"""Name of what is no tensor, among the tensors: no parameter has it."""
_MODEL = "model"


@dataclass(frozen=True)
class Resumed:
    """What is still to be done with the state that was loaded."""

    offer: Offer
    place: str
    """Where it was, in words."""
    callbacks: Mapping[str, Any]

    def restore_callbacks(self, state: State) -> None:
        """Give callbacks their state, and call those that have not been called after the last step: nobody knows its
        figures. Raises CheckpointMismatch."""
        for callback in state.callbacks.every:
            if callback.name in self.callbacks:
                restore_callback(callback, self.callbacks[callback.name], self.place)
        if self.offer.uncalled:
            state.callbacks.call("on_step", state)


def resume(
    config: Config, world: World, state: State, memory: PodMemory | None, newest: Callable[[], int | None]
) -> Resumed | None:
    """Load the newest state that has survived in a pod; None where there is none that is to be used, with a line of the
    log. The memory is empty afterwards.

    newest: returns, on rank 0, the step of the newest complete checkpoint.
    """
    if config.generation == 0:
        return None
    checkpoint = world.from_first(newest, int | None)
    choice = choose(world.gather(_offer(config, memory), Offer), checkpoint)
    found = _state_of(choice, world, state, memory) if isinstance(choice, Choice) else choice
    # All have what they take from it, or nobody takes anything.
    world.gather(True, bool)
    if memory is not None and config.local_rank == 0:
        memory.clear()
    if isinstance(found, str):
        log_first_rank(world, f"the state of no surviving rank is used: {found}")
        return None
    assert isinstance(choice, Choice)
    place = f"the memory of rank {choice.offer.left_by}, which has survived"
    _apply(state, found, world, place)
    _restore_random_state(config, world, memory, choice.step)
    disk = "there is no checkpoint" if checkpoint is None else f"the newest checkpoint is of step {checkpoint}"
    log_first_rank(world, f"resuming after step {state.step} from {place}; {disk}")
    return Resumed(choice.offer, place, found.get(CALLBACKS, {}))


def _offer(config: Config, memory: PodMemory | None) -> Offer:
    if memory is None:
        return Offer(why="a pod keeps no memory beside its ranks")
    left = memory.header()
    if left is None:
        return Offer()
    if not belongs(left, config):
        return Offer(why=f"what rank {left.rank} has left is of another life of the ranks")
    return Offer(left.step, left.rank, left.uncalled, left.due, left.why)


def _state_of(choice: Choice, world: World, state: State, memory: PodMemory | None) -> dict[str, Any] | str:
    """Return the chosen state, which its holder hands to all; why not where it cannot be used."""
    tensors: dict[str, Tensor] = {}
    forms: dict[str, Form] = {}
    if world.rank == choice.holder:
        assert memory is not None
        try:
            tensors, rest = memory.read_state()
            tensors[_REST] = to_bytes(rest)
            forms = {name: form_of(one) for name, one in tensors.items()}
        except Exception as error:
            print(f"disttrain: the state in the pod's memory: {one_line(error)}", file=sys.stderr, flush=True)
    forms = _from_holder(forms, choice.holder, world)
    if not forms:
        return f"what rank {choice.offer.left_by} has left cannot be read"
    own = _own_tensors(state)
    flaws = world.gather(_misfit(forms, own), str | None)
    if (flaw := next((flaw for flaw in flaws if flaw is not None), None)) is not None:
        # To look at its state begins it.
        state.optimizer.state.clear()
        return flaw
    found = {name: _handed_out(name, form, own, tensors, choice.holder, world) for name, form in sorted(forms.items())}
    rest = from_bytes(found.pop(_REST))
    return dict(unflatten_state_dict(found | rest["values"], rest["paths"]))


def _from_holder(own: dict[str, Form], holder: int, world: World) -> dict[str, Form]:
    """Return what the holder has, on every rank."""
    if world.rank != holder:
        found: dict[str, Form] = receive(dict[str, Form], holder)
        return found
    for rank in range(world.size):
        if rank != holder:
            send(own, dict[str, Form], rank)
    return own


def _own_tensors(state: State) -> dict[str, Tensor]:
    """The tensors of this rank's model and optimizer, into which those of the survivor are written."""
    flat, _ = flatten_state_dict({_MODEL: get_model_state_dict(state.module), OPTIMIZER: optimizer_state_of(state)})
    return {name: value for name, value in flat.items() if isinstance(value, Tensor)}


def _misfit(forms: Mapping[str, Form], own: Mapping[str, Tensor]) -> str | None:
    """Return where the survivor's state is not one of this rank's model and optimizer."""
    for name, one in own.items():
        if (name in forms and forms[name] != form_of(one)) or (name not in forms and name.startswith(f"{_MODEL}.")):
            return f"`{name[:80]}` is another one there than here"
    unknown = [name for name in forms if name.startswith((f"{_MODEL}.", f"{OPTIMIZER}.")) and name not in own]
    return f"`{unknown[0][:80]}` is there and not here" if unknown else None


@torch.no_grad()
def _handed_out(
    name: str, form: Form, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], holder: int, world: World
) -> Tensor:
    """Return a tensor of the holder, on every rank."""
    shape, dtype = form
    target = own.get(name)
    if target is None or not target.is_contiguous():
        target = torch.empty(shape, dtype=dtype)
    if world.rank == holder:
        target.copy_(tensors[name])
    if target.numel():
        # As bytes: not every number format can be sent.
        dist.broadcast(target.detach().reshape(-1).view(torch.uint8), holder)
    return target


def _apply(state: State, contents: dict[str, Any], world: World, place: str) -> None:
    """Load it. What is wrong with it is not the user's to repair: the next life begins with the checkpoint."""
    set_model_state_dict(state.module, contents[_MODEL])
    restore_optimizer(state, contents.get(OPTIMIZER, {}))
    try:
        restore_values(state, contents, world.rank, place)
    except TrainerError as error:
        raise RuntimeError(str(error)) from error


def _restore_random_state(config: Config, world: World, memory: PodMemory | None, step: int) -> None:
    """Go on with the random state that this rank had after the step, as far as its pod knows it."""
    packed = memory.random_state(config.generation - 1, step) if memory is not None else None
    if packed is None:
        seed_everything(config.training.seed, 1 + world.part, step)
    else:
        restore_packed_random_state(packed)
    unknown = [str(rank) for rank, known in enumerate(world.gather(packed is not None, bool)) if not known]
    if unknown:
        log_first_rank(world, f"random states after step {step} are not known of ranks {', '.join(unknown)}: new ones")
