"""How ranks that start again in their pods go on from the state of those that survived the failure before.

Every method is called by all ranks together. They say what lies in the memory of their pods, choose by the same rule
(choose.py), and those with the same part of the model have it from one of them. Whatever does not fit, nothing was
loaded: the checkpoint is next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from disttrain_trainer.checkpoint.checkpoints import restore_values
from disttrain_trainer.checkpoint.kept_callbacks import CALLBACKS, cut_as_here, restore_callback
from disttrain_trainer.checkpoint.kept_optimizer import OPTIMIZER, optimizer_state_of, restore_optimizer
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import TrainerError, one_line
from disttrain_trainer.runtime.json_collectives import Form, form_of, receive, send
from disttrain_trainer.runtime.local import local_part
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

    due: bool
    """Whether what is due after the last step may not have been done."""
    uncalled: tuple[bool, bool]
    """Whether callbacks were not called after it: those whose state this rank has, and those of some rank."""
    place: str
    """Where it was, in words."""
    callbacks: Mapping[str, Any]

    def restore_callbacks(self, state: State) -> None:
        """Give callbacks their state, and call those that have not been called after the last step: nobody knows its
        figures. Raises CheckpointMismatch."""
        for callback in state.callbacks.every:
            if callback.name in self.callbacks:
                restore_callback(callback, cut_as_here(callback, self.callbacks[callback.name]), self.place)
        own, some = self.uncalled
        # The ranks call those without a state together, or not at all.
        every = [one for one in state.callbacks.every if (own if one.keeps_state else some)]
        replace(state.callbacks, every=every).call("on_step", state)


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
    offers = world.gather(_offer(config, memory), Offer)
    choice = choose(offers, [world.mesh.part(rank) for rank in range(world.size)], checkpoint)
    found = _state_of(choice.sources, offers, world, state, memory) if isinstance(choice, Choice) else choice
    # All have what they take from it, or nobody takes anything.
    world.gather(True, bool)
    if memory is not None and memory.owned:
        memory.clear()
    if isinstance(found, str):
        log_first_rank(world, f"the state of no surviving rank is used: {found}")
        return None
    assert isinstance(choice, Choice)
    used = [offers[source] for source in choice.sources]
    place = _in_words(sorted({offer.left_by for offer in used}))
    _apply(state, found, world, place)
    _restore_random_state(config, world, memory, choice.step)
    disk = "there is no checkpoint" if checkpoint is None else f"the newest checkpoint is of step {checkpoint}"
    log_first_rank(world, f"resuming after step {state.step} from {place}; {disk}")
    uncalled = used[world.rank].uncalled, any(offer.uncalled for offer in used)
    return Resumed(any(offer.due for offer in used), uncalled, place, found.get(CALLBACKS, {}))


def _in_words(survivors: Sequence[int]) -> str:
    if len(survivors) == 1:
        return f"the memory of rank {survivors[0]}, which has survived"
    return f"the memory of ranks {', '.join(map(str, survivors[:-1]))} and {survivors[-1]}, which have survived"


def _offer(config: Config, memory: PodMemory | None) -> Offer:
    if memory is None:
        return Offer(why="a pod keeps no memory beside its ranks")
    left = memory.header()
    if left is None:
        return Offer()
    if not belongs(left, config):
        return Offer(why=f"what rank {left.rank} has left is of another life of the ranks")
    return Offer(left.step, left.rank, left.uncalled, left.due, left.why)


def _state_of(
    sources: Sequence[int], offers: Sequence[Offer], world: World, state: State, memory: PodMemory | None
) -> dict[str, Any] | str:
    """Return this rank's part of the chosen state, from its source; why not where some rank's cannot be used."""
    source = sources[world.rank]
    tensors: dict[str, Tensor] = {}
    forms: dict[str, Form] = {}
    if world.rank == source:
        assert memory is not None
        try:
            tensors, rest = memory.read_state()
            tensors[_REST] = to_bytes(rest)
            forms = {name: form_of(one) for name, one in tensors.items()}
        except Exception as error:
            print(f"disttrain: the state in the pod's memory: {one_line(error)}", file=sys.stderr, flush=True)
    receivers = {one: [rank for rank, found in enumerate(sources) if found == one] for one in sorted(set(sources))}
    forms = _from_source(forms, source, receivers[source], world)
    own = _own_tensors(state)
    unread = None if forms else f"what rank {offers[source].left_by} has left cannot be read"
    flaws = world.gather(unread or _misfit(forms, own), str | None)
    if (flaw := next((flaw for flaw in flaws if flaw is not None), None)) is not None:
        # To look at its state begins it.
        state.optimizer.state.clear()
        return flaw
    # One group would be the world once more.
    group = dist.new_subgroups_by_enumeration(list(receivers.values()))[0] if len(receivers) > 1 else None
    found = {
        name: _handed_out(form, own.get(name), tensors.get(name), source, group) for name, form in sorted(forms.items())
    }
    rest = from_bytes(found.pop(_REST))
    return dict(unflatten_state_dict(found | rest["values"], rest["paths"]))


def _from_source(own: dict[str, Form], source: int, receivers: Sequence[int], world: World) -> dict[str, Form]:
    """Return what the source has, on every receiver."""
    if world.rank != source:
        found: dict[str, Form] = receive(dict[str, Form], source)
        return found
    for rank in receivers:
        if rank != source:
            send(own, dict[str, Form], rank)
    return own


def _own_tensors(state: State) -> dict[str, Tensor]:
    """The tensors of this rank's model and optimizer, into which those of the survivor are written."""
    flat, _ = flatten_state_dict({_MODEL: get_model_state_dict(state.module), OPTIMIZER: optimizer_state_of(state)})
    return {name: value for name, value in flat.items() if isinstance(value, Tensor)}


def _misfit(forms: Mapping[str, Form], own: Mapping[str, Tensor]) -> str | None:
    """Return where the survivor's state is not one of this rank's model and optimizer."""
    for name, one in own.items():
        differs = name in forms and forms[name] != form_of(local_part(one))
        if differs or (name not in forms and name.startswith(f"{_MODEL}.")):
            return f"`{name[:80]}` is another one there than here"
    unknown = [name for name in forms if name.startswith((f"{_MODEL}.", f"{OPTIMIZER}.")) and name not in own]
    return f"`{unknown[0][:80]}` is there and not here" if unknown else None


@torch.no_grad()
def _handed_out(
    form: Form, own: Tensor | None, there: Tensor | None, source: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Return a tensor of the source's, on every rank of the group: this rank's own, or one of its part's form.

    there: the tensor, on the source.
    """
    shape, dtype = form
    values = torch.empty(shape, dtype=dtype) if own is None else local_part(own.detach())
    sent = values if values.is_contiguous() else torch.empty(shape, dtype=dtype)
    if there is not None:
        sent.copy_(there)
    if sent.numel():
        # As bytes: not every number format can be sent.
        dist.broadcast(sent.reshape(-1).view(torch.uint8), source, group)
    if sent is not values:
        values.copy_(sent)
    return values if own is None else own


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
        seed_everything(config.training.seed, 1 + world.part + world.parts * world.at["pipeline"], step)
    else:
        restore_packed_random_state(packed)
    unknown = [str(rank) for rank, known in enumerate(world.gather(packed is not None, bool)) if not known]
    if unknown:
        log_first_rank(world, f"random states after step {step} are not known of ranks {', '.join(unknown)}: new ones")
