"""Samples become batches on the device."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from disttrain_trainer.data.sampler import Slots
from disttrain_trainer.device import in_host_memory, pins_memory
from disttrain_trainer.errors import InvalidConfiguration
from disttrain_trainer.losses import weight_of


class MapDataset(Protocol):
    """What a data set must offer: a length, and (input, target) at each index below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[object, object]: ...


@dataclass(frozen=True)
class Datasets:
    """Samples to train on, and samples held out for evaluation; the latter may be none."""

    training: MapDataset
    held_out: MapDataset | None


@dataclass(frozen=True)
class Microbatch:
    """inputs [B, ...], targets [B, ...], weights [B] (1 sample, 0 padding) on the device."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    weight: float
    """Samples or tokens that count."""
    samples: int
    """Samples that are not padding."""


def load_microbatch(dataset: MapDataset, slots: Slots, device: torch.device) -> Microbatch:
    """Read the samples of `slots` and move them to the device. Raises InvalidConfiguration for what is no sample."""
    samples = [dataset[int(index)] for index in slots.indices]
    if not (isinstance(samples[0], Sequence) and len(samples[0]) == 2):
        kind = type(samples[0]).__name__
        raise InvalidConfiguration(f"`training.data`: sample {slots.indices[0]} is a {kind}, expected (input, target)")
    inputs, targets = default_collate(samples)
    weights = torch.from_numpy(slots.weights)
    return Microbatch(
        _moved(inputs, device),
        _moved(targets, device),
        _moved(weights, device),
        weight_of(targets, weights),
        int(slots.weights.sum()),
    )


def _moved(values: Tensor, device: torch.device) -> Tensor:
    """On the device; a GPU fetches them when it comes to it, and nobody waits for its earlier work."""
    if pins_memory(device) and in_host_memory(values):
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def share_of(size: int, batch_size: int, part: int, parts: int) -> Iterator[Slots]:
    """Part `part` of 0..size - 1, in batches: every index has weight 1 in exactly one part.

    All parts have as many batches, of the same sizes: ranks that share layers must call them together. What is missing
    is filled up with sample 0 of weight 0.
    """
    own = np.arange(part, part + math.ceil(size / parts) * parts, parts)
    for start in range(0, len(own), batch_size):
        indices = own[start : start + batch_size]
        there = indices < size
        yield Slots(np.where(there, indices, 0), there.astype(np.float32))
