"""Export of a model from a checkpoint of any layout into safetensors files, by one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from disttrain_trainer.checkpoint.compatibility import stored_shapes
from disttrain_trainer.checkpoint.kept_callbacks import CALLBACKS, TENSORS
from disttrain_trainer.checkpoint.safetensors_index import MODEL_FILE
from disttrain_trainer.checkpoint.safetensors_writer import SHARD_BYTES, Described, write_file, write_folder
from disttrain_trainer.checkpoint.step_manifest import Place
from disttrain_trainer.checkpoint.step_reader import StepReader, load
from disttrain_trainer.checkpoint.verify import lone_flaw_of
from disttrain_trainer.checkpoint.weights import are_weights, weights_at
from disttrain_trainer.ema import AVERAGE, ENTRYPOINT
from disttrain_trainer.runtime.errors import CheckpointBroken, InvalidConfiguration, one_line, shown

_PREFIX = "model."


@dataclass(frozen=True)
class Piece:
    """A tensor of an export, and what of the checkpoint it is made of."""

    name: str
    reads: tuple[str, ...]
    """The first one's format is its own."""
    combine: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: tensors[0]
    shape: tuple[int, ...] | None = None
    """None: that of the first one."""


class StoredModel:
    """The model of a checkpoint, read tensor by tensor."""

    def __init__(self, path: Place, *, averaged: bool = False, dtype: torch.dtype | None = None) -> None:
        """averaged: with the averages of its parameters (ema.py) in their place. dtype: number format that its
        floating-point tensors are exported in; None: each in its own.

        Raises InvalidConfiguration, CheckpointBroken or OSError.
        """
        self.source, self._dtype = weights_at(path), dtype
        if are_weights(self.source):
            raise InvalidConfiguration(f"{self.source} holds weights without a run already; name a checkpoint")
        flaw = lone_flaw_of(self.source)
        if flaw is not None:
            raise CheckpointBroken(f"{flaw}; export another checkpoint")
        self._reader = StepReader(self.source)
        metadata = self._reader.read_metadata()
        names = stored_shapes(metadata, _PREFIX)
        entries = {name: metadata.state_dict_metadata[_PREFIX + name] for name in names}
        self._stored = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self._averages = _averages_in(metadata) if averaged else {}
        if averaged and not self._averages:
            raise InvalidConfiguration(
                f"{self.source} holds no averages of parameters: train with `{ENTRYPOINT}` in `training.callbacks`"
            )
        self.others = sorted(entries.keys() - self._stored.keys())
        """Names of what a model holds besides tensors."""

    @property
    def names(self) -> Collection[str]:
        """The tensors, in the order of the model."""
        return self._stored.keys()

    def describe(self, piece: Piece) -> Described:
        """Return what is to be written of a piece. Raises InvalidConfiguration where the checkpoint has it not."""
        for name in piece.reads:
            if name not in self._stored:
                raise InvalidConfiguration(f"{self.source} is of another model: it has no parameter `{shown(name)}`")
        entry = self._stored[piece.reads[0]]
        shape = tuple(entry.size) if piece.shape is None else piece.shape
        stored = entry.properties.dtype
        dtype = self._dtype if self._dtype is not None and stored.is_floating_point else stored
        return Described(piece.name, dtype, shape)

    def read(self, name: str) -> Tensor:
        """Return a tensor. Raises CheckpointBroken or OSError."""
        entry = self._stored[name]
        value = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            load(_nested(self._averages.get(name, ("model", name)), value), self._reader, self.source)
        except CheckpointException as failure:
            # The rest are CheckpointBroken.
            cause = next((cause for cause, _ in failure.failures.values()), failure)
            raise OSError(f"{self.source} cannot be read: {one_line(cause)}") from failure
        return value


def export_weights(path: Place, target: Path, *, averaged: bool = False, dtype: torch.dtype | None = None) -> list[str]:
    """Write the model of a checkpoint into one safetensors file, under the module's own names.

    averaged, dtype: see StoredModel. Returns the names of what a model holds besides tensors, which is left out.
    Raises InvalidConfiguration, CheckpointBroken or OSError.
    """
    model = StoredModel(path, averaged=averaged, dtype=dtype)
    pieces = [Piece(name, (name,)) for name in model.names]
    write_file(target, [model.describe(piece) for piece in pieces], _reading(model, pieces))
    return model.others


def export_folder(
    model: StoredModel,
    pieces: Sequence[Piece],
    target: Path,
    beside: Mapping[str, bytes | Path],
    most: int = SHARD_BYTES,
    model_file: str = MODEL_FILE,
) -> None:
    """Write pieces of a model into a folder of safetensors files, with other files beside them, whole or not at all.

    most: bytes of a file. Raises InvalidConfiguration, CheckpointBroken or OSError.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidConfiguration(f"{target} is there already; name a folder that is not")
    tensors = [model.describe(piece) for piece in pieces]
    write_folder(target, tensors, _reading(model, pieces), beside, most, model_file)


def _reading(model: StoredModel, pieces: Iterable[Piece]) -> Callable[[str], Tensor]:
    piece_of = {piece.name: piece for piece in pieces}
    times = Counter(part for piece in piece_of.values() for part in piece.reads)
    # The pieces of a layer's two stacks of experts are written in turn.
    kept = lru_cache(maxsize=2)(model.read)

    def read(name: str) -> Tensor:
        piece = piece_of[name]
        value = piece.combine([(kept if times[part] > 1 else model.read)(part) for part in piece.reads])
        return _in_format(value, model.describe(piece))

    return read


def _in_format(value: Tensor, wanted: Described) -> Tensor:
    """Return a tensor in the format that it is written in.

    Raises InvalidConfiguration where that format ends before the tensor's numbers.
    """
    if value.dtype == wanted.dtype:
        return value
    found = value.to(wanted.dtype)
    if bool((found.isfinite() != value.isfinite()).any()):
        raise InvalidConfiguration(
            f"`{shown(wanted.name)}` has numbers of up to {value.abs().max().item():.3g}, but "
            f"{str(wanted.dtype).removeprefix('torch.')} ends at {torch.finfo(wanted.dtype).max:.3g}: export it as "
            "bfloat16 or float32"
        )
    return found


def _averages_in(metadata: Metadata) -> dict[str, tuple[str, ...]]:
    """Return the key of each parameter's average, by the parameter's name."""
    above = (CALLBACKS, ENTRYPOINT, TENSORS)
    prefix = ".".join((*above, f"{AVERAGE}/"))
    names = (name.removeprefix(prefix) for name in metadata.state_dict_metadata if name.startswith(prefix))
    return {name: (*above, f"{AVERAGE}/{name}") for name in names}


def _nested(path: Sequence[str], value: Tensor) -> dict[str, Any]:
    *above, last = path
    contents: dict[str, Any] = {last: value}
    for key in reversed(above):
        contents = {key: contents}
    return contents
