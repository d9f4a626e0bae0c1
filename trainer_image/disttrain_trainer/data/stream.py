"""Samples that are iterated (protocols.IterableDataset), numbered as each replica reads them.

The loop asks for samples by number, in order. It reads a step ahead, and looks at samples before it trains on them; so
the position before each step is remembered, and a step that is asked for again is read again from there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from disttrain_api.batch import Batch
from disttrain_trainer.data.sampler import Cursor, Sampler, Slots
from disttrain_trainer.protocols import IterableDataset
from disttrain_trainer.runtime.errors import DataNotFound, InvalidConfiguration, one_line
from disttrain_trainer.runtime.plain import require_plain

_REMEMBERED = 2
"""Steps whose beginnings are remembered: the one that is trained on and the next one, which is loaded meanwhile."""


class Stream:
    """One replica's part of an iterable data set; endless, since an iterator that ends is followed by a new one."""

    def __init__(self, dataset: IterableDataset, place: str) -> None:
        """place: in the manifest and in the user's code, for messages."""
        self.place = place
        self._dataset = dataset
        self._iterator: Iterator[Any] | None = None
        self._per_step = 1
        self._begin = self._next = 0
        self._positions: dict[int, Any] = {}

    @property
    def shards(self) -> bool:
        """Whether the data set can be taken apart."""
        return callable(getattr(self._dataset, "shard", None))

    @property
    def joins_positions(self) -> bool:
        """Whether the data set goes on from the positions of another number of parts."""
        return callable(getattr(self._dataset, "load_state_dicts", None))

    @property
    def first(self) -> int:
        """The first number that can be asked for."""
        return min(self._positions, default=self._next)

    def open(self, part: int, parts: int, per_step: int) -> None:
        """Take part `part` of `parts`, of which a step takes `per_step` samples.

        Raises InvalidConfiguration where no checkpoint can hold the position, or the data set does not take its own.
        """
        if parts > 1:
            self._dataset = self._dataset.shard(part, parts)
        self._per_step = per_step
        self.place = f"{self.place}, part {part + 1} of {parts}"
        self._try_position()

    def _try_position(self) -> None:
        """Go to the position where the data set stands."""
        position = self._position()
        try:
            require_plain(position, f"{self.place}: state_dict()")
        except ValueError as error:
            raise InvalidConfiguration(str(error)) from error
        try:
            self._go_to(self._next, position)
        except Exception as error:
            raise InvalidConfiguration(
                f"{self.place}: load_state_dict does not take what state_dict returned: {type(error).__name__}: "
                f"{one_line(error)}"
            ) from error

    def __getitem__(self, number: int) -> Any:
        """Return the sample; numbers come in order, or go back to where a remembered step begins."""
        if number != self._next:
            self._go_to(number, self._positions[number])
        if (number - self._begin) % self._per_step == 0:
            self._positions[number] = self._position()
            for old in sorted(self._positions)[:-_REMEMBERED]:
                del self._positions[old]
        sample = self._read()
        self._next += 1
        return sample

    def position_before(self, number: int) -> Any:
        """Return the data set's state before a sample that begins a step."""
        return self._position() if number == self._next else self._positions[number]

    def resume(self, number: int, position: Mapping[str, Any]) -> None:
        """Go on from `position_before(number)`. Raises what the data set raises."""
        self._positions.clear()
        self._begin = number
        self._go_to(number, position)

    def resume_from_parts(self, number: int, positions: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the positions of another number of parts, all before the same sample of the job, which is this
        part's `number`. Raises what the data set raises."""
        self._positions.clear()
        self._begin = number
        self._dataset.load_state_dicts(copy.deepcopy(positions))  # type: ignore[attr-defined]
        self._iterator, self._next = None, number

    def _go_to(self, number: int, position: Mapping[str, Any]) -> None:
        self._dataset.load_state_dict(copy.deepcopy(position))
        self._iterator, self._next = None, number

    def _position(self) -> Any:
        return copy.deepcopy(self._dataset.state_dict())

    def _read(self) -> Any:
        """The next sample. Raises DataNotFound where a new iterator has none."""
        # One that goes on from the end of the data ends at once.
        for _ in range(3):
            if self._iterator is None:
                self._iterator = iter(self._dataset)
            for sample in self._iterator:
                return sample
            self._iterator = None
        raise DataNotFound(f"{self.place}: the training samples end before the first one")


@dataclass(frozen=True)
class StreamSampler(Sampler):
    """Numbers the samples of each replica from 0. `size` is 0; a cursor's position counts those of all replicas."""

    @classmethod
    def of(cls, batch: Batch, replicas: int, seed: int = 0) -> StreamSampler:
        """The sampler of these batches."""
        return cls(size=0, seed=seed, batch=batch, replicas=replicas)

    @property
    def per_step(self) -> int:
        """Samples of a replica in a step."""
        return self.batch.passes * self.batch.micro

    def number(self, cursor: Cursor) -> int:
        """The first sample of a replica in the global batch at `cursor`."""
        return cursor.position // self.replicas

    def microbatches(self, cursor: Cursor, replica: int) -> list[Slots]:
        begin, micro = self.number(cursor), self.batch.micro
        return [self._of(begin + at, micro, replica) for at in range(0, self.per_step, micro)]

    def advance(self, cursor: Cursor) -> Cursor:
        return Cursor(cursor.epoch, cursor.position + self.per_step * self.replicas)

    def _of(self, begin: int, count: int, replica: int) -> Slots:
        return Slots(np.arange(begin, begin + count), np.ones(count, dtype=np.float32), (self.seed, replica, begin))
