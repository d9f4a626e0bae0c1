"""Microbatches that worker processes read ahead of the loop: torch's DataLoader over the sampler's slots.

Each worker reads whole microbatches, which come in order. A microbatch is a function of its slots, also where samples
are drawn at random (sampler.py), so a job trains to the same bits with any number of workers, and after a resume.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from disttrain_trainer.data.batches import Batching, Microbatch, on_device, read_microbatch
from disttrain_trainer.data.sampler import Cursor, Sampler, Slots
from disttrain_trainer.protocols import MapDataset
from disttrain_trainer.runtime.errors import one_line
from disttrain_trainer.runtime.signature import Origin, origin_of, raised_at

_MOST_CAUSES = 8
_MOST_LINES = 40


class Loader:
    """A replica's microbatches on its device, read by `workers` processes from the first step that is asked for on."""

    def __init__(self, batching: Batching, dataset: MapDataset, sampler: Sampler, replica: int, workers: int) -> None:
        self._samples = _Microbatches(batching, dataset)
        self._sampler, self._replica, self._workers = sampler, replica, workers
        self._next: Cursor | None = None
        self._read: Iterator[Microbatch | _Failure] = iter(())

    def load(self, cursor: Cursor, device: torch.device) -> list[Microbatch]:
        """Return the microbatches of the global batch at `cursor`. Raises what reading them has raised."""
        if cursor != self._next:
            self._read = self._reading(cursor)
        found = [next(self._read) for _ in range(self._sampler.batch.passes)]
        self._next = self._sampler.advance(cursor)
        return [on_device(_sound(one), device) for one in found]

    def close(self) -> None:
        """End the workers."""
        self._next, self._read = None, iter(())

    def _reading(self, cursor: Cursor) -> Iterator[Microbatch | _Failure]:
        loader = DataLoader(
            self._samples,
            sampler=self._slots(cursor),  # type: ignore[arg-type] # of a sampler it takes the iterator alone
            batch_size=None,
            num_workers=self._workers,
            # What data sets hold need not be picklable, and is not copied. A worker must leave the GPU alone.
            multiprocessing_context=get_context("fork"),
            # Else it would draw the seeds of workers from this rank's stream.
            generator=torch.Generator(),
        )
        return iter(loader)

    def _slots(self, cursor: Cursor) -> Iterator[Slots]:
        """Yield the slots from the global batch at `cursor` on, without end."""
        while True:
            yield from self._sampler.microbatches(cursor, self._replica)
            cursor = self._sampler.advance(cursor)


class _Microbatches(Dataset[Any]):
    """A microbatch by its slots, as a worker reads it."""

    def __init__(self, batching: Batching, dataset: MapDataset) -> None:
        self._batching, self._dataset = batching, dataset

    def __getitem__(self, slots: Slots) -> Microbatch | _Failure:
        # DataLoader would make one text of the exception, its causes and their places.
        try:
            return read_microbatch(self._batching, self._dataset, slots)
        except (Exception, SystemExit) as error:
            return _Failure.of(error)


@dataclass(frozen=True)
class _Failure:
    """An error of a worker process."""

    errors: tuple[tuple[BaseException, Origin], ...]
    """The exception, and those that it was raised from, none of which pickle keeps."""

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        error.add_note("In a process that reads data:\n" + "".join(traceback.format_exception(error)[-_MOST_LINES:]))
        found: list[tuple[BaseException, Origin]] = []
        cause: BaseException | None = error
        while cause is not None and len(found) < _MOST_CAUSES:
            found.append((_travelling(cause), origin_of(cause)))
            cause = cause.__cause__
        return cls(tuple(found))

    def raised(self) -> BaseException:
        """Return the exception as it was in the worker."""
        first, *causes = (raised_at(error, origin) for error, origin in self.errors)
        last = first
        for cause in causes:
            last.__cause__ = cause
            last = cause
        return first


def _travelling(error: BaseException) -> BaseException:
    """Return the error, or what stands for one that cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: TID251 - what this process has just made
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {one_line(error)}")
    return error


def _sound(read: Microbatch | _Failure) -> Microbatch:
    if isinstance(read, _Failure):
        raise read.raised()
    return read
