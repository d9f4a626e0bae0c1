"""Microbatches of several steps that are read together, where those of one step are too few for that to pay."""

from contextlib import suppress
from itertools import islice

import torch
from torch import Tensor

from disttrain_trainer.data.batches import (
    SAMPLES_AT_ONCE,
    Batching,
    Microbatch,
    map_tensors,
    on_device,
    read_microbatches,
    reads_together,
)
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.data.stream import Stream
from disttrain_trainer.protocols import MapDataset

MOST_BYTES = 4 * 2**20
"""Batches that are read at once have so many at most."""


class ReadAhead:
    """A replica's microbatches on its device, those of up to `most_steps` steps read at once, as their size allows."""

    def __init__(
        self, batching: Batching, dataset: MapDataset, sampler: Sampler, replica: int, most_steps: int
    ) -> None:
        self._batching, self._dataset = batching, dataset
        self._sampler, self._replica, self._most_steps = sampler, replica, most_steps
        # How large one is, the first step tells.
        self._steps = 1
        self._read: dict[Cursor, list[Microbatch]] = {}

    def load(self, cursor: Cursor, device: torch.device) -> list[Microbatch]:
        """Return the microbatches of the global batch at `cursor`. Raises what reading them has raised."""
        if cursor not in self._read:
            self._read = self._reading(cursor)
            fit = MOST_BYTES // max(1, sum(map(_bytes_of, self._read[cursor])))
            self._steps = max(1, min(self._most_steps, fit))
        return [on_device(one, device) for one in self._read.pop(cursor)]

    def close(self) -> None:
        """Let go of what was read."""
        self._read = {}

    def _reading(self, cursor: Cursor) -> dict[Cursor, list[Microbatch]]:
        cursors = [cursor]
        while len(cursors) < self._steps:
            cursors.append(self._sampler.advance(cursors[-1]))
        # The step whose samples cannot be read says so itself: those before it can be done.
        with suppress(Exception):
            return self._of(cursors)
        return self._of([cursor])

    def _of(self, cursors: list[Cursor]) -> dict[Cursor, list[Microbatch]]:
        slots = [self._sampler.microbatches(one, self._replica) for one in cursors]
        read = iter(list(read_microbatches(self._batching, self._dataset, [one for step in slots for one in step])))
        return {one: list(islice(read, len(step))) for one, step in zip(cursors, slots, strict=True)}


def _bytes_of(microbatch: Microbatch) -> int:
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(note, microbatch.batch)
    return sum(sizes)


def ahead_of(batching: Batching, dataset: MapDataset | Stream, sampler: Sampler, replica: int) -> ReadAhead | None:
    """Return what reads a replica's steps ahead; None where that gains nothing, or would change what samples draw."""
    steps = SAMPLES_AT_ONCE // (sampler.batch.micro * sampler.batch.passes)
    if isinstance(dataset, Stream) or steps < 2 or sampler.draws or not reads_together(batching, dataset):
        return None
    return ReadAhead(batching, dataset, sampler, replica, steps)
