"""State of users' objects, plain values and tensors, as one tensor of bytes."""

import io
import os
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_DEPTH = 64
_ARRAYS = ("builtins bytearray", "__builtin__ bytearray")
"""torch's list of safe calls has them, `require_plain` has not: thirty bytes of a call make any number of zeros."""


def require_plain(value: Any, path: str, depth: int = 0) -> None:
    """Raise ValueError, which names the place, for anything but plain values and tensors."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{path[:80]}… is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, DTensor):
        raise ValueError(f"{path} is a tensor that is cut over ranks: only models and optimizers may have those")
    if type(value) in (dict, OrderedDict):
        for key, inner in value.items():
            if type(key) not in _PLAIN:
                raise ValueError(f"{path} has the key {key!r:.40}, a {type(key).__name__}: keys must be plain values")
            require_plain(inner, f"{path}[{key!r:.40}]", depth + 1)
    elif type(value) in (list, tuple):
        for index, inner in enumerate(value):
            require_plain(inner, f"{path}[{index}]", depth + 1)
    elif not isinstance(value, Tensor) and type(value) not in _PLAIN:
        raise ValueError(
            f"{path} is a {type(value).__module__}.{type(value).__name__}, expected tensors, numbers, texts, None, and "
            "lists, tuples and dictionaries of them"
        )


def to_bytes(state: Any) -> Tensor:
    """Return plain state as a tensor of uint8."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.from_numpy(np.frombuffer(bytearray(file.getbuffer()), dtype=np.uint8))


def from_bytes(data: Tensor) -> Any:
    """Return the state; nothing in it is run. Raises ValueError for bytes that are none."""
    try:
        return load_plain(io.BytesIO(data.numpy().tobytes()))
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise ValueError("it holds something else than plain values and tensors; nothing of it was run") from error


def load_plain(file: io.BytesIO) -> Any:
    """Return what torch.save has written; nothing in it is run, and what is made of it takes about as much as it does.

    Raises UnpicklingError for what is no such file or has something else made, RuntimeError where it is damaged.
    """
    _require_bounded(file, file.getbuffer().nbytes)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251 - runs no code


def map_plain(path: Path) -> Any:
    """Return the same of a file, in which its tensors stay, outside of this process. Raises as `load_plain`."""
    with path.open("rb") as file:
        _require_bounded(file, os.fstat(file.fileno()).st_size)
    return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251 - runs no code


def _require_bounded(file: IO[bytes], size: int) -> None:
    """Raises UnpicklingError where a few bytes could ask for many."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            # torch compresses nothing. Its format before archives takes the size of a tensor from the pickle.
            if sum(entry.file_size for entry in entries) > size:
                raise pickle.UnpicklingError("an archive that is larger than its file")
            for entry in entries:
                if entry.filename.endswith("data.pkl"):
                    _require_no_array(archive.read(entry))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, RuntimeError) as error:
        raise pickle.UnpicklingError(f"no archive of torch.save: {error}") from error


def _require_no_array(pickled: bytes) -> None:
    for instruction, argument, _ in pickletools.genops(pickled):
        if instruction.name == "GLOBAL" and argument in _ARRAYS:
            raise pickle.UnpicklingError(f"GLOBAL {str(argument).replace(' ', '.')}")
