"""A model in several safetensors files, as Hugging Face's libraries write it: an index says which tensor is in which.

model.safetensors.index.json: {"metadata": {"total_size": bytes}, "weight_map": {tensor: file beside the index}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from disttrain_trainer.checkpoint.json_walk import Walk
from disttrain_trainer.checkpoint.safetensors_file import MAX_HEADER_BYTES, SUFFIX, StoredTensor, read_tensors
from disttrain_trainer.runtime.errors import CheckpointBroken, shown
from disttrain_trainer.runtime.files import read_linked

INDEX_FILE = "model.safetensors.index.json"
MODEL_FILE = "model.safetensors"
"""A model that is small enough for one file."""
_MAX_FILES = 10_000
_OTHERS = 2**16
"""Characters of what else an index may hold: it is not used."""


def read_files(path: Path) -> dict[str, tuple[Path, StoredTensor]]:
    """Return the file and the description of each tensor of a safetensors file, or of all files of an index.

    Data are not read. Raises CheckpointBroken with a sentence that names the file and what is wrong with it.
    """
    if path.name != INDEX_FILE:
        return {name: (path, stored) for name, stored in read_tensors(path).items()}
    file_of = _read_index(path)
    found: dict[str, tuple[Path, StoredTensor]] = {}
    for file in sorted(set(file_of.values())):
        for name, stored in read_tensors(path.parent / file).items():
            if file_of.get(name) != file:
                raise CheckpointBroken(
                    f"{path} is damaged: `{shown(name)}` is in {file}, where the index does not have it; write it again"
                )
            found[name] = (path.parent / file, stored)
    for name in file_of.keys() - found.keys():
        raise CheckpointBroken(f"{path} is damaged: `{shown(name)}` is not in {file_of[name]}; write it again")
    return found


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        text = read_linked(path, MAX_HEADER_BYTES)
    except OSError as error:
        raise CheckpointBroken(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        file_of = _weight_map(text.decode())
    except ValueError as error:
        raise CheckpointBroken(
            f"{path} is no index of a model: {shown(str(error))}; expected a `weight_map` of files by tensor"
        ) from None
    files = set(file_of.values())
    for file in sorted(files):
        if Path(file).name != file or not file.endswith(SUFFIX):
            raise CheckpointBroken(f"{path} names the file `{shown(file)}`, expected a {SUFFIX} file beside the index")
    if len(files) > _MAX_FILES:
        raise CheckpointBroken(f"{path} names {len(files)} files, expected at most {_MAX_FILES}")
    return file_of


def _weight_map(text: str) -> dict[str, str]:
    """Raises ValueError for what is none."""
    found: dict[str, str] | None = None
    walk = Walk(text)
    for name in walk.items():
        if name != "weight_map":
            walk.value(_OTHERS)
            continue
        known: dict[str, str] = {}
        found = {}
        for tensor in walk.items():
            file = walk.text()
            # One text for all tensors of a file.
            found[tensor] = known.setdefault(file, file)
    walk.end()
    if found is None:
        raise ValueError("it has none")
    return found
