"""What a rank leaves in the memory of its pod when it ends because another rank is lost.

While all ranks train, no parameter and no state of the optimizer is copied. After each step the rank notes that its
state stands between two steps (`updated`), and keeps its random state and its buffers, which the next forward pass
changes. From the begin of an update to the next such note there is no state to leave. A rank that finds a peer lost
writes its state between two steps, or why it has none.
"""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from disttrain_api.memory import in_words
from disttrain_api.parallelism import DataParallelMode
from disttrain_trainer.checkpoint.checkpoints import contents_of
from disttrain_trainer.checkpoint.kept_callbacks import saved_callbacks
from disttrain_trainer.checkpoint.kept_optimizer import OPTIMIZER, saved_optimizer
from disttrain_trainer.data.stream import Stream
from disttrain_trainer.ema import Ema
from disttrain_trainer.parallel.pipedream.flow import Flow
from disttrain_trainer.parallel.untouched import with_extra_state
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import PeerLost, one_line, peer_lost
from disttrain_trainer.runtime.host_limits import memory_available
from disttrain_trainer.runtime.local import local_part
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import packed_random_state
from disttrain_trainer.state import State
from disttrain_trainer.survivors.memory import MAX_WHY, Left, PodMemory


class Survivor:
    """This rank, as long as it lives. memory: None where the pod keeps none; then nothing is done."""

    def __init__(self, config: Config, world: World, state: State, memory: PodMemory | None) -> None:
        self._memory, self._world, self._state = memory, world, state
        self._generation = config.generation
        self._identity = identity(config, world.rank)
        self._why_not = why_never(config, world, state)
        self._agrees = _holds_shared_part(world) and all(world.gather(memory is not None and not self._why_not, bool))
        """Whether a state takes parts of several ranks, which must be of the same step."""
        self._step: int | None = None
        self._torn: str | None = None
        """What is only half done, in words."""
        self._uncalled = self._due = False
        """Whether the last step's callbacks are still to be called, and what is due after it is still to be done."""
        self._buffers: list[Tensor] = []
        self._kept: list[Tensor] = []
        if memory is not None and self._why_not is None:
            # torch's optimizers copy their hooks nowhere, so it is gone with the optimizer.
            state.optimizer.register_step_pre_hook(lambda *_: self._update_begins())
            persistent = state.module.state_dict().keys()
            self._buffers = [one for name, one in state.module.named_buffers() if name in persistent]
            self._kept = [torch.empty_like(one) for one in self._buffers]

    def begin(self, *, due: bool) -> None:
        """Note that the state is the one that this life begins with. due: as `Resumed` has it."""
        self.updated()
        self._uncalled, self._due = False, due

    def updated(self) -> None:
        """Note that the state stands between two steps."""
        if self._memory is None or self._why_not is not None:
            return
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._kept, self._buffers)
        self._keep_random_state(self._state.step)
        self._step, self._torn = self._state.step, None
        self._uncalled = self._due = True

    def computed(self) -> None:
        """Note that the passes of a step are over: nothing else of it draws at random."""
        # Where this rank is killed before it has done the step, another one may still do it.
        if self._memory is not None and self._why_not is None:
            self._keep_random_state(self._state.step + 1)

    def agree(self) -> None:
        """Where ranks hold parts, wait until each has its part of the step's gradient.

        So none updates its part before all can do so, and what they leave is one step, whichever of them is lost.
        """
        if self._agrees:
            self._world.sum(0.0)

    def _update_begins(self) -> None:
        self._torn = "an update"

    def _keep_random_state(self, step: int) -> None:
        assert self._memory is not None
        self._memory.keep_random_state(self._generation, step, packed_random_state())

    @contextmanager
    def calling_callbacks(self) -> Iterator[None]:
        """Inside, callbacks are called after a step, and those that keep state change it."""
        if any(callback.keeps_state for callback in self._state.callbacks.every):
            self._torn = "its callbacks"
        yield
        self._uncalled, self._torn = False, None

    @contextmanager
    def doing_what_is_due(self) -> Iterator[None]:
        """Inside, what is due after the last step is done."""
        yield
        self._due = False

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Where a lost peer ends what is done inside, leave the state."""
        try:
            yield
        # CheckpointException is no Exception.
        except BaseException as error:
            if self._memory is not None and (isinstance(error, PeerLost) or peer_lost(error)):
                self._leave(self._memory)
            raise

    def _leave(self, memory: PodMemory) -> None:
        """Write the state, unless another rank of the pod has left one of the same part that is as new."""
        with memory.locked():
            former = memory.header()
            there = former.step if former is not None and former.generation == self._generation else None
            if there is not None and (self._step is None or there >= self._step):
                return
            why = self._why_not or self._why_not_now()
            if why is None:
                try:
                    why = self._write(memory)
                except Exception as error:
                    memory.clear()
                    there = None
                    why = f"rank {self._world.rank} could not write its state: {one_line(error)}"
            step = self._step if why is None else None
            if why is None or there is None:
                flags = {"uncalled": self._uncalled, "due": self._due}
                found = {"step": step, "why": (why or "")[:MAX_WHY], **flags}
                memory.write_header(self._identity.model_copy(update=found))

    def _why_not_now(self) -> str | None:
        """Return why the state is not to be used; None: it may be."""
        rank, state = self._world.rank, self._state
        if not self._step:
            return f"rank {rank} had done no step"
        if self._torn is not None or state.step != self._step:
            return f"rank {rank} was in the middle of {self._torn or 'a step'}"
        # Only this rank's part is looked at: the ranks with the others may be lost.
        if not all(bool(torch.isfinite(local_part(one.detach())).all()) for one in state.parameters):
            return f"parameters of rank {rank} are not finite"
        return None

    def _write(self, memory: PodMemory) -> str | None:
        """Write the state; return why not where the memory is too small, or it is not known as it was."""
        state = self._state
        # First the model's: that puts this rank's parts back in place of what a pass that broke off has gathered.
        contents = contents_of(state, self._world.rank)
        del contents["random"]
        kept = {one.data_ptr(): copy for one, copy in zip(self._buffers, self._kept, strict=True) if one.numel()}
        persistent = contents["model"].keys()
        for name, one in state.module.named_buffers():
            if name in persistent and one.numel() and one.data_ptr() not in kept:
                return f"the model has replaced its buffer {name[:80]} since the last step"
        contents["model"] = {name: kept.get(one.data_ptr(), one) for name, one in contents["model"].items()}
        contents |= {OPTIMIZER: saved_optimizer(state)} | saved_callbacks(state, 0)
        flat, paths = flatten_state_dict(contents)
        tensors = {name: local_part(value.detach()) for name, value in flat.items() if isinstance(value, Tensor)}
        values = {name: value for name, value in flat.items() if name not in tensors}
        too_little = without_room(sum(one.nbytes for one in tensors.values()), memory_available(), _largest())
        if too_little is None:
            memory.write_state(tensors, {"paths": paths, "values": values})
        return too_little


def identity(config: Config, rank: int) -> Left:
    """Return by whom, and in which life of which job, something is left."""
    digest = hashlib.sha256(config.job.model_dump_json().encode()).hexdigest()
    layout = f"{config.world_size} {config.local_world_size} {digest}"
    return Left(uid=config.job.uid, attempt=config.attempt, generation=config.generation, layout=layout, rank=rank)


def belongs(left: Left, config: Config) -> bool:
    """Return whether it was left in the life of this attempt's ranks before this one."""
    former = identity(replace(config, generation=config.generation - 1), left.rank)
    same = ("uid", "attempt", "generation", "layout")
    return all(getattr(left, name) == getattr(former, name) for name in same)


def why_never(config: Config, world: World, state: State) -> str | None:
    """Return why no rank of this job leaves its state; None: they do."""
    if world.size == 1:
        return "the job has one rank"
    if not world.device.computes_on_host:
        return "on GPUs ranks do not leave their state: what they have asked the GPU for may not have been done"
    if len({world.mesh.part(rank) for rank in range(world.size)}) == world.size:
        return f"no two ranks hold the same part of the model ({world.mesh.describe()})"
    if isinstance(state.pipeline, Flow):
        return "the stages of a pipeline without a flush are at different steps"
    if config.job.parallelism.data_parallel.mode is not DataParallelMode.ALL_REDUCE or state.replicas is not None:
        return "the replicas train alone, or with servers"
    if (config.job.parallelism.devices_per_process or 1) > 1:
        return "ranks have several devices"
    if state.gradient_sum is not None and state.gradient_sum.kept is not None:
        return "the compression keeps of each rank what it has not sent"
    if isinstance(state.data.training, Stream):
        return "the data are iterated"
    if any(True for _ in with_extra_state([state.module])):
        return "the model has extra state"
    for callback in state.callbacks.every:
        if callback.keeps_state and not isinstance(callback.own, Ema):
            return f"{callback.name[:80]} keeps state of its own"
    return None


def _holds_shared_part(world: World) -> bool:
    """Whether ranks hold parts of the model, and others the same ones."""
    parts = len({world.mesh.part(rank) for rank in range(world.size)})
    return world.device.computes_on_host and 1 < parts < world.size


def without_room(needed: int, available: int | None, rank: int) -> str | None:
    """Return why there is no room for so many bytes in the pod's memory; None: there is.

    available: bytes that can be had now; None: not known. rank: bytes that one takes at most. The lost rank has given
    back its own, and another one will take as much.
    """
    if available is not None and needed > available - rank:
        room = in_words(max(0, available - rank))
        return f"the state has {in_words(needed)}, and beside its ranks the pod has {room} of memory"
    return None


def _largest() -> int:
    """The most memory that this process has had at a time, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
