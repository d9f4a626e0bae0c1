"""Samples become batches on the device."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disttrain_api import choices, samples
from disttrain_trainer.data.choices import ChoiceTask
from disttrain_trainer.data.packed import Packed
from disttrain_trainer.data.prompts import Prompts
from disttrain_trainer.data.rows import Predicting, Rows
from disttrain_trainer.data.sampler import Slots
from disttrain_trainer.data.stream import Stream
from disttrain_trainer.protocols import Batch, MapDataset
from disttrain_trainer.runtime.device import in_host_memory, pins_memory
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.randomness import drawing_from

MAX_DEPTH = 16
"""Containers inside each other in a batch."""
SAMPLES_AT_ONCE = 128
"""To read more together saves no more time, and their memory would be kept until the last microbatch has its part."""


@dataclass(frozen=True)
class Datasets:
    """Samples to train on, and samples held out for evaluation; the latter may be none."""

    training: MapDataset | Stream
    held_out: MapDataset | None
    vocabulary: int | None = None
    """All tokens are below; None where nobody has said so."""
    fingerprint: str | None = None
    """64 hexadecimal digits that tell corpora apart; None where the data has none."""
    former_fingerprints: Sequence[str] = ()
    """Fingerprints of this very data in earlier releases."""
    settings: Mapping[str, str | float] = field(default_factory=dict)
    """What `training.data.config` says of which samples there are and which are held out, by field; `name` is that of
    the data. A checkpoint goes on with the same alone."""
    draws: bool = True
    """Whether samples may be drawn at random while they are read."""
    sketches: Sequence[tuple[str, list[tuple[float, float]]] | None] = ()
    """What some of the training samples are (sketch.py); none where they are iterated, or drawn anew each time."""
    longest: int | None = None
    """Samples are sequences of unlike lengths, up to this one; a batch is filled up to its longest. None: alike."""
    notes: Sequence[str] = ()
    """What the log is to say of the data."""
    packed: bool = False
    """Whether samples are Packed."""
    choices: Sequence[ChoiceTask] = ()
    """Questions that evaluations ask."""
    parts: Sequence[tuple[str, int]] = ()
    """What is held out, if it is of several corpora: the name of each and its samples, in order."""
    prompts: Prompts | None = None
    """Texts that the model continues at evaluations."""

    @property
    def size(self) -> int | None:
        """Training samples; None where they are iterated."""
        return None if isinstance(self.training, Stream) else len(self.training)

    @property
    def evaluated_inputs(self) -> Iterator[tuple[str, ChoiceTask | Prompts]]:
        """Yield what evaluations read beside held-out samples, by its field."""
        for task in self.choices:
            yield f"{choices.FIELD}.tasks.{task.name}", task
        if self.prompts is not None:
            yield samples.FIELD, self.prompts

    @cached_property
    def first_sample(self) -> Any:
        """A training sample to look at, which is read once; training goes on as if it had not been."""
        return self.training[self.training.first if isinstance(self.training, Stream) else 0]


def loss_of(part: str) -> str:
    """Return the name of the figure of one of `Datasets.parts`."""
    return f"{part}/loss"


@dataclass(frozen=True)
class Microbatch:
    """A batch. weights: [B], 1 for a sample and 0 for padding."""

    batch: Batch
    weights: Tensor
    weight: float
    """What counts in the mean loss: samples or tokens."""
    samples: int
    """Samples that are not padding."""
    host_starts: Tensor | None = None
    """`starts` in the host's memory, where the batch has left it."""

    @property
    def inputs(self) -> Tensor:
        """Inputs [B, ...] of a supervised batch, whose other part is targets [B, ...]."""
        inputs: Tensor = self.batch[0]
        return inputs

    @property
    def targets(self) -> Tensor:
        """Targets [B, ...] of a supervised batch."""
        targets: Tensor = self.batch[1]
        return targets

    @property
    def starts(self) -> Tensor | None:
        """Where the document of each token begins (see Packed); None where each sequence is one."""
        return self.batch.starts if isinstance(self.batch, Packed) else None


class Batching(Protocol):
    """How a task makes batches of samples."""

    @property
    def pads(self) -> bool:
        """Whether a short microbatch is filled up with samples of weight 0; else it is short."""

    def collate(self, samples: Sequence[Any], indices: Sequence[int]) -> Batch:
        """Return the batch on the host. indices: the samples' numbers, for messages."""

    def weight(self, batch: Batch, weights: Tensor) -> float:
        """Return what the batch counts for in the mean loss. weights: [B]."""


def load_microbatch(batching: Batching, dataset: MapDataset | Stream, slots: Slots, device: torch.device) -> Microbatch:
    """Read the samples of `slots` and move them to the device. Raises InvalidConfiguration for what is no sample."""
    return on_device(read_microbatch(batching, dataset, slots), device)


def load_microbatches(
    batching: Batching, dataset: MapDataset | Stream, slots: Sequence[Slots], device: torch.device
) -> list[Microbatch]:
    """Do so for all microbatches of a step."""
    return [on_device(read, device) for read in read_microbatches(batching, dataset, slots)]


def read_microbatch(batching: Batching, dataset: MapDataset | Stream, slots: Slots) -> Microbatch:
    """Return the same on the host."""
    if not batching.pads:
        slots = _without_padding(slots)
    indices: list[int] = slots.indices.tolist()
    with drawing_from(slots.seeds) if slots.seeds else nullcontext():
        return _microbatch(batching, _samples(dataset, indices), indices, slots.weights)


def read_microbatches(batching: Batching, dataset: MapDataset | Stream, slots: Sequence[Slots]) -> Iterator[Microbatch]:
    """Yield those of a step on the host. Small ones of a data set that reads samples together are read at once."""
    together = _microbatches_at_once(batching, dataset, slots)
    for first in range(0, len(slots), together):
        some = slots[first : first + together]
        if len(some) == 1:
            yield read_microbatch(batching, dataset, some[0])
            continue
        indices: list[list[int]] = [one.indices.tolist() for one in some]
        samples = _samples(dataset, list(chain.from_iterable(indices)))
        for one, numbers, part in zip(some, indices, _cut(samples, list(map(len, indices))), strict=True):
            yield _microbatch(batching, part, numbers, one.weights)


def reads_together(batching: Batching, dataset: MapDataset | Stream) -> bool:
    """Return whether samples of several microbatches may be read at once, where they draw nothing."""
    return batching.pads and _reads_together(type(dataset))


def _microbatches_at_once(batching: Batching, dataset: MapDataset | Stream, slots: Sequence[Slots]) -> int:
    """Return how many microbatches are read together: one where each draws by itself, or is cut by itself."""
    joins = reads_together(batching, dataset) and not any(one.seeds for one in slots)
    return max(1, SAMPLES_AT_ONCE // max(1, len(slots[0].indices))) if joins and slots else 1


def _microbatch(
    batching: Batching, samples: Sequence[Any], indices: Sequence[int], counted: NDArray[np.float32]
) -> Microbatch:
    batch, weights = batching.collate(samples, indices), torch.from_numpy(counted)
    return Microbatch(batch, weights, batching.weight(batch, weights), int(sum(counted.tolist())))


def _samples(dataset: MapDataset | Stream, indices: Sequence[int]) -> Sequence[Any]:
    if not _reads_together(type(dataset)):
        return [dataset[index] for index in indices]
    samples: Sequence[Any] = dataset.__getitems__(indices)  # type: ignore[union-attr]
    if len(samples) != len(indices):
        raise InvalidConfiguration(
            f"`training.data`: `__getitems__` gave {len(samples)} samples for {len(indices)} numbers"
        )
    return samples


def _cut(samples: Sequence[Any], sizes: list[int]) -> list[Any]:
    """The samples in parts of so many."""
    if isinstance(samples, Rows):
        return samples.cut(sizes)
    ends = list(accumulate(sizes))
    return [samples[end - size : end] for size, end in zip(sizes, ends, strict=True)]


@lru_cache(maxsize=64)
def _reads_together(kind: type) -> bool:
    """Return whether a data set has `__getitems__`, torch's name for samples that are read together, of its own.

    That of a base class, or of an object within, knows nothing of what this class's `__getitem__` does.
    """
    for one in kind.__mro__:
        if "__getitems__" in vars(one):
            return True
        if "__getitem__" in vars(one):
            return False
    return False


def on_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """Return the microbatch with every tensor on the device; a GPU fetches them when it comes to it."""
    if isinstance(microbatch.batch, Predicting) and microbatch.batch.inputs.device == device:
        # To take small ones apart and put them together takes a third of their time.
        return microbatch
    batch, weights = moved(microbatch.batch, device), _moved(microbatch.weights, device)
    return dataclasses.replace(microbatch, batch=batch, weights=weights, host_starts=microbatch.starts)


def _without_padding(slots: Slots) -> Slots:
    """The samples that count; where none does, one of weight 0, since all ranks compute together."""
    counted = slots.weights > 0
    if not counted.any():
        counted[0] = True
    return Slots(slots.indices[counted], slots.weights[counted], slots.seeds)


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on the device; a GPU fetches them when it comes to it."""
    return map_tensors(lambda tensor: _moved(tensor, device), batch)


def map_tensors(change: Callable[[Tensor], Tensor], batch: Batch, depth: int = 0) -> Batch:
    """A copy of the batch in which `change` was applied to every tensor; what holds none stays as it is.

    Mappings, lists, tuples, named tuples, dataclasses. Raises ValueError below MAX_DEPTH containers.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, str | bytes | int | float | None):
        return batch
    if depth == MAX_DEPTH:
        raise ValueError(f"a batch holds more than {MAX_DEPTH} containers inside each other")

    def inner(value: Batch) -> Batch:
        return map_tensors(change, value, depth + 1)

    if isinstance(batch, Mapping):
        changed = {key: inner(value) for key, value in batch.items()}
        return changed if type(batch) is dict else type(batch)(changed)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(inner, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(inner, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: inner(getattr(batch, field.name)) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **fields)
    return batch


def _moved(values: Tensor, device: torch.device) -> Tensor:
    """Return the values on the device, without waiting for the GPU's earlier work."""
    if pins_memory(device) and in_host_memory(values):
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def share_of(size: int, batch_size: int, part: int, parts: int, *, draws: bool = True) -> Iterator[Slots]:
    """Part `part` of 0..size - 1, in batches: every index has weight 1 in exactly one part.

    All parts have as many batches, of the same sizes: ranks that share layers must call them together. What is missing
    is filled up with sample 0 of weight 0. What is drawn for a batch is the same each time.
    """
    own = np.arange(part, part + math.ceil(size / parts) * parts, parts)
    for start in range(0, len(own), batch_size):
        indices = own[start : start + batch_size]
        there = indices < size
        yield Slots(np.where(there, indices, 0), there.astype(np.float32), (part, start) if draws else ())
