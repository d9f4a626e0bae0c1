"""Sketch of a sample: enough to distinguish data of the same size.

Whole numbers, texts and shapes must be the same; floating-point numbers alike, since another kind of processor may
round otherwise what a data set computes of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from disttrain_trainer.data.batches import MAX_DEPTH
from disttrain_trainer.protocols import MapDataset

Sketch = tuple[str, list[tuple[float, float]]]
"""Digest of what must be the same; of each group of floating-point numbers its 2-norm, and a sum with mixed signs."""

_TOLERANCE = 1e-3
"""Parts of the 2-norm. Other samples have another sum, by about as much as they differ."""
_UNKNOWN = (0.0, 0.0)
_MOST_NUMBERS = 2**16
"""Numbers of a tensor that are looked at, evenly spread."""


def places_of(size: int) -> list[int]:
    """The samples that are looked at: the first, the last, and two between."""
    return sorted({0, size // 3, 2 * size // 3, size - 1})


def sketches_of(dataset: MapDataset) -> list[Sketch | None]:
    """Return the sketches of the samples at `places_of`; None for one that cannot be read: the step that needs it
    reports that."""
    return [_sketch_at(dataset, place) for place in places_of(len(dataset))]


def sketch_of(sample: Any) -> Sketch:
    """Return the sketch of a sample: tensors, arrays and plain values in containers; of anything else only its type."""
    digest = hashlib.sha256()
    numbers: list[tuple[float, float]] = []
    for part in _parts(sample, 0):
        if isinstance(part, np.ndarray):
            digest.update(f"{part.shape}".encode())
            if part.dtype.kind in "fc":
                numbers.append(_of_numbers(part))
            else:
                digest.update(np.ascontiguousarray(part).tobytes() if part.dtype.kind in "biuSUmM" else b"")
        elif isinstance(part, float):
            numbers.append((abs(part), part) if math.isfinite(part) else _UNKNOWN)
        else:
            digest.update(f"{part}\n".encode(errors="backslashreplace"))
    return digest.hexdigest()[:16], numbers


def alike(one: Sketch, other: Sketch) -> bool:
    """Whether they are of the same sample."""
    return one[0] == other[0] and len(one[1]) == len(other[1]) and all(map(_alike, one[1], other[1]))


def first_unlike(some: Sequence[Sketch | None], others: Sequence[Sketch | None]) -> int | None:
    """The first index at which both know a sample, and not the same; None where there is none."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((at for at, (one, other) in pairs if one and other and not alike(one, other)), None)


def _sketch_at(dataset: MapDataset, place: int) -> Sketch | None:
    try:
        return sketch_of(dataset[place])
    except Exception:
        return None


def _alike(one: tuple[float, float], other: tuple[float, float]) -> bool:
    tolerance = _TOLERANCE * max(one[0], other[0])
    return abs(one[0] - other[0]) <= tolerance and abs(one[1] - other[1]) <= tolerance


def _of_numbers(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    flat = values.reshape(-1)[:: max(1, values.size // _MOST_NUMBERS)]
    flat = (flat.astype(np.complex128).view(np.float64) if flat.dtype.kind == "c" else flat).astype(np.float64)
    flat = np.nan_to_num(flat, posinf=0.0, neginf=0.0)
    mixed = np.arange(flat.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    signs = 1.0 - 2.0 * (mixed & np.uint64(1)).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(np.linalg.norm(flat)), float(flat @ signs)
    return found if all(map(math.isfinite, found)) else _UNKNOWN


def _parts(value: Any, depth: int) -> Iterator[Any]:
    """Arrays, floating-point numbers and texts that say what else there is."""
    if isinstance(value, Tensor):
        yield from _of_tensor(value)
    elif isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, float | np.floating):
        yield float(value)
    elif isinstance(value, str | bytes | int | np.integer | None):
        yield repr(value)
    elif depth == MAX_DEPTH:
        return
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield repr(key)
            yield from _parts(inner, depth + 1)
    elif isinstance(value, list | tuple):
        yield f"{len(value)} values"
        for inner in value:
            yield from _parts(inner, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _parts([getattr(value, field.name) for field in dataclasses.fields(value)], depth + 1)
    else:
        yield f"a {type(value).__name__}"


def _of_tensor(value: Tensor) -> Iterator[Any]:
    yield f"{tuple(value.shape)}"
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        return
    value = value.detach().cpu()
    if value.is_floating_point() or value.is_complex():
        yield value.to(torch.complex128 if value.is_complex() else torch.float64).resolve_conj().numpy()
    else:
        yield value.numpy()
