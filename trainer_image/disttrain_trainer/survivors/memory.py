"""The memory of a pod that outlives its ranks (disttrain_agent/memory.py), as a rank uses it.

marks    for each file below a header, which says whose state it holds; of each rank the last two random states
states   the model, the optimizer and all else that replicas have in common, as torch.save writes it: each part of the
         model that ranks of the pod hold, in the file of the first of them

Random states are written in every step, since those of a rank that is killed are lost otherwise: about 10 kB.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.plain import map_plain

HEADER_BYTES = 4096
SLOT_BYTES = 16 * 1024
_SLOTS = 2
"""A rank has so many: the chosen step may be the last one of this rank, or the one before."""
_TAG = struct.Struct("<qqq")
"""Generation, step, and length of what follows."""
_NO_TAG = _TAG.pack(-1, -1, 0)
_Count = Annotated[int, Field(ge=0, lt=2**53)]
MAX_WHY = 500
_Text = Annotated[str, Field(max_length=MAX_WHY)]


class Left(BaseModel):
    """What a rank has left, or why it has left nothing."""

    uid: _Text
    """The uid of the job."""
    attempt: _Count
    generation: _Count
    layout: _Text
    """Digest of the job and its number of ranks."""
    rank: _Count
    step: _Count | None = None
    """The last one that is in the state. None: there is no state."""
    uncalled: bool = False
    """Whether callbacks were not called after this step."""
    due: bool = False
    """Whether what is due after this step, a checkpoint or an evaluation, may not have been done."""
    why: _Text = ""
    """Why there is no state."""


def open_memory(config: Config, world: World) -> PodMemory | None:
    """Return the memory of this rank's pod; None where it keeps none."""
    if not config.pod_memory:
        return None
    marks, *states = config.pod_memory
    try:
        return PodMemory(marks, states, config.local_rank, _first_with_part(config, world))
    except OSError:
        return None


def _first_with_part(config: Config, world: World) -> int:
    """The first rank of the pod, by its number there, that holds the same part of the model as this one."""
    if world.size != config.world_size:
        # A worker of parameter servers, which leaves nothing.
        return config.local_rank
    first = config.rank - config.local_rank
    parts = [world.mesh.part(rank) for rank in range(first, first + config.local_world_size)]
    return parts.index(world.mesh.part(config.rank))


class PodMemory:
    """The marks, and the state of this rank's part of the model. Raises OSError where they cannot be opened."""

    def __init__(self, marks: Path, states: Sequence[Path], local_rank: int, keeper: int) -> None:
        """keeper: the rank of the pod whose file the state is in."""
        self.owned = local_rank == keeper
        """Whether it is this one."""
        self._state = states[keeper]
        self._descriptor = os.open(marks, os.O_RDWR | os.O_CLOEXEC)
        headers = len(states) * HEADER_BYTES
        size = headers + len(states) * _SLOTS * SLOT_BYTES
        # Every rank of the pod asks for the same.
        os.ftruncate(self._descriptor, size)
        self._map = mmap.mmap(self._descriptor, size)
        self._header = slice(keeper * HEADER_BYTES, (keeper + 1) * HEADER_BYTES)
        self._slots = headers + local_rank * _SLOTS * SLOT_BYTES

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other rank of the pod writes a state or a header. A rank that is killed leaves no lock."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def header(self) -> Left | None:
        """What was left last; None for nothing, and for what is none."""
        text = self._map[self._header].rstrip(b"\0")
        try:
            return Left.model_validate_json(text)
        except ValidationError:
            return None

    def write_header(self, left: Left) -> None:
        """Say what there is, once it is there."""
        self._map[self._header] = left.model_dump_json().encode().ljust(HEADER_BYTES, b"\0")

    def clear(self) -> None:
        """Give back what was left; random states stay."""
        self._map[self._header] = bytes(HEADER_BYTES)
        os.truncate(self._state, 0)

    def write_state(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Write a state. Raises OSError or RuntimeError where there is no room."""
        self.clear()
        with self._state.open("wb") as file:
            torch.save({"tensors": tensors, "rest": rest}, file)

    def read_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what `write_state` was given; the tensors lie where they were written. Raises UnpicklingError for what
        would have code run, and what else torch.load does for what is no state."""
        found = map_plain(self._state)
        return found["tensors"], found["rest"]

    def keep_random_state(self, generation: int, step: int, packed: bytes) -> None:
        """Keep this rank's random state after a step, in place of that of the step before the last one."""
        at = self._slots + step % _SLOTS * SLOT_BYTES
        content = at + _TAG.size
        # Who is killed in between leaves a slot of no step.
        self._map[at:content] = _NO_TAG
        self._map[content : content + len(packed)] = packed
        self._map[at:content] = _TAG.pack(generation, step, len(packed))

    def random_state(self, generation: int, step: int) -> bytes | None:
        """Return the random state that this rank had in that life after that step; None where it is not known."""
        at = self._slots + step % _SLOTS * SLOT_BYTES
        content = at + _TAG.size
        tag = _TAG.unpack(self._map[at:content])
        return self._map[content : content + tag[2]] if tag[:2] == (generation, step) else None
