"""Samples to a batch as torch.utils.data.default_collate does it, with a sentence where samples do not go together."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional
from torch.utils.data import default_collate

from disttrain_trainer.losses import IGNORED
from disttrain_trainer.runtime.errors import InvalidConfiguration, one_line

_DEPTH = 16


def collate(field: str, samples: Sequence[Any], indices: Sequence[int]) -> Any:
    """The batch. Raises InvalidConfiguration naming the first part that differs. indices: the samples' numbers."""
    try:
        return default_collate(list(samples))
    except (TypeError, RuntimeError, KeyError, ValueError) as error:
        raise InvalidConfiguration(f"`{field}`: {_why(samples, indices, error)}") from error


def filled_up(samples: Sequence[tuple[Tensor, Tensor]], length: int | None) -> list[tuple[Tensor, Tensor]]:
    """Return sequences [T] and their targets [T] with T = `length`, or that of the longest; what is added to the
    targets does not count."""
    length = length or max(len(inputs) for inputs, _ in samples)
    return [
        (
            functional.pad(inputs, (0, length - len(inputs))),
            functional.pad(targets, (0, length - len(targets)), value=IGNORED),
        )
        for inputs, targets in samples
    ]


def _why(samples: Sequence[Any], indices: Sequence[int], error: Exception) -> str:
    first = dict(parts_of(samples[0]))
    for part, kind in first.items():
        if not kind.collated:
            return f"{part} of sample {indices[0]} is a {kind.text}: batches are made of tensors, numbers and text"
    for index, sample in zip(indices[1:], samples[1:], strict=True):
        other = dict(parts_of(sample))
        for part in [*first, *other]:
            ours, theirs = (kinds[part].text if part in kinds else "missing" for kinds in (first, other))
            if ours != theirs:
                return (
                    f"{part} of sample {indices[0]} is {ours}, of sample {index} {theirs}: samples of a batch must be "
                    "alike; fill them up, or give the task a method `collate`"
                )
    return f"sample {indices[0]} cannot become a batch: {one_line(error)}"


@dataclasses.dataclass(frozen=True)
class Kind:
    """Description of a part of a sample."""

    text: str
    collated: bool = True


def parts_of(sample: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Kind]]:
    """(name of the part, what it is) of all parts of a sample, in order."""
    name = f"part {path}" if path else "all"
    if isinstance(sample, Mapping) and depth < _DEPTH:
        for key, value in sample.items():
            yield from parts_of(value, f"{path}[{key!r:.40}]", depth + 1)
    elif isinstance(sample, list | tuple) and depth < _DEPTH:
        for number, value in enumerate(sample):
            yield from parts_of(value, f"{path}[{number}]", depth + 1)
    else:
        yield name, _kind_of(sample)


def _kind_of(value: Any) -> Kind:
    if isinstance(value, Tensor):
        return Kind(f"a tensor of shape {list(value.shape)}, {str(value.dtype).removeprefix('torch.')}")
    if isinstance(value, np.ndarray):
        return Kind(f"an array of shape {list(value.shape)}, {value.dtype}")
    scalar = isinstance(value, str | bytes | int | float | np.generic)
    return Kind(type(value).__name__, scalar)
