"""Batches of a data set in an order that is a function of (seed, epoch, position) alone, so that a resume repeats it.

The order of an epoch is the trainer's permutation (disttrain_trainer.data.sampler). What a data set draws at random is
drawn from a stream of its own for each batch: the same in the main process, in workers, and after a resume.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, default_collate

from disttrain_trainer.data.batches import moved
from disttrain_trainer.data.sampler import Cursor, permute
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import drawing_from

Collate = Callable[[list[Any]], Any]


class _Batches(Dataset):
    """Batch of this rank by its cursor."""

    def __init__(self, samples: Any, batch_size: int, world: World, seed: int, shuffle: bool, collate: Collate) -> None:
        self._samples, self._size, self._seed, self._shuffle = samples, len(samples), seed, shuffle
        self._batch_size, self._rank, self._collate = batch_size, world.rank, collate

    def __getitem__(self, cursor: Cursor) -> Any:
        first = cursor.position + self._rank * self._batch_size
        positions = np.arange(first, first + self._batch_size)
        indices = permute(positions, self._size, self._seed, cursor.epoch) if self._shuffle else positions
        with drawing_from((self._seed, cursor.epoch, first)):
            return self._collate([self._samples[int(index)] for index in indices])


class Loader:
    """An endless iterator of this rank's batches, on the rank's device; it ends when the session's steps are done.

    One epoch uses as many samples as whole batches of all ranks have; which ones are left out changes from epoch to
    epoch.
    """

    def __init__(
        self, samples: Any, batch_size: int, world: World, finished: Callable[[], bool], *, seed: int,
        shuffle: bool, num_workers: int, collate_fn: Collate | None,
        loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        """loading: what happens around the reading of a batch."""
        for name in ("__len__", "__getitem__"):
            if not hasattr(samples, name):
                kind = type(samples).__name__
                raise ValueError(f"the data set, a {kind}, has no {name}: a loader takes samples by index")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size is {batch_size!r}, expected a whole number of at least 1")
        self._together, self._size = batch_size * world.size, len(samples)
        if self._together > self._size:
            raise ValueError(
                f"the data set has {self._size} samples, and a batch of {batch_size} on each of {world.size} ranks "
                f"needs {self._together}"
            )
        self._batches = _Batches(samples, batch_size, world, seed, shuffle, collate_fn or default_collate)
        self._device, self._finished, self._workers = world.device.torch, finished, num_workers
        self._loading, self._cursor = loading, Cursor()
        self._loaded: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Go on where the last batch was taken."""
        while not self._finished():
            yield next(self)

    def __next__(self) -> Any:
        """Return the next batch, also after the last step."""
        if self._loaded is None:
            # A generator of its own: the loader would draw from the script's.
            options = {"generator": torch.Generator(), "num_workers": self._workers}
            self._loaded = iter(DataLoader(self._batches, sampler=_cursors(self), batch_size=None, **options))
        with self._loading():
            batch = next(self._loaded)
        self._cursor = self.after(self._cursor)
        return tree_map(lambda value: moved(value, self._device) if isinstance(value, Tensor) else value, batch)

    def after(self, cursor: Cursor) -> Cursor:
        """Return the cursor after the batch at `cursor`."""
        position = cursor.position + self._together
        fits = position + self._together <= self._size
        return Cursor(cursor.epoch, position) if fits else Cursor(cursor.epoch + 1, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data, and the sizes that it counts in."""
        place = {"epoch": self._cursor.epoch, "position": self._cursor.position}
        return {**place, "samples": self._size, "together": self._together}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a saved position. Raises ValueError where it counts in other batches or samples."""
        if (state["samples"], state["together"]) != (self._size, self._together):
            raise ValueError(
                f"the position in the data is one in {state['samples']} samples by {state['together']}; here are "
                f"{self._size} samples by {self._together}"
            )
        self._cursor, self._loaded = Cursor(state["epoch"], state["position"]), None


class _cursors:  # noqa: N801 - a sampler, of which a DataLoader only takes the iterator
    """The cursors from the loader's own on."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Cursor]:
        cursor = self._loader._cursor
        while True:
            yield cursor
            cursor = self._loader.after(cursor)
