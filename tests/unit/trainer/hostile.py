"""Checkpoints that somebody else has made: as their manifests say, and with a surprise inside."""

import hashlib
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from disttrain_trainer.checkpoint.step_manifest import MANIFEST_FILE, FileDigest, StepManifest

METADATA_FILE = ".metadata"
DATA_FILE = "__0_0.distcp"


class Runs:
    """Becomes, when it is unpickled, a call that makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def sign(folder: Path) -> None:
    """Write a manifest that says that all is well."""
    path = folder / MANIFEST_FILE
    manifest = StepManifest.model_validate_json(path.read_text())
    contents = {file.name: file.read_bytes() for file in folder.iterdir() if file != path}
    files = {
        name: FileDigest(size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
    path.write_text(manifest.model_copy(update={"files": files}).text())


def metadata_in(folder: Path) -> Metadata:
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    assert isinstance(metadata, Metadata)
    return metadata


def write_metadata(folder: Path, metadata: object) -> None:
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    sign(folder)


def as_metadata(folder: Path, mark: Path) -> None:
    """The whole file is the call."""
    write_metadata(folder, Runs(mark))


def within_metadata(folder: Path, mark: Path) -> None:
    """All of the true metadata, and a call in a corner of it that nobody looks at."""
    metadata = metadata_in(folder)
    metadata.planner_data = {"model": Runs(mark)}
    write_metadata(folder, metadata)


def as_value(folder: Path, mark: Path) -> None:
    """The metadata are honest; a value that they lead to is the call."""
    metadata = metadata_in(folder)
    value = io.BytesIO()
    torch.save(Runs(mark), value)
    info = metadata.storage_data[MetadataIndex("train.epoch")]
    with (folder / DATA_FILE).open("ab") as file:
        info.offset, info.length = file.tell(), len(value.getvalue())
        file.write(value.getvalue())
    write_metadata(folder, metadata)


def elsewhere(folder: Path, mark: Path) -> None:
    """A value lies in a file outside of the folder."""
    value = io.BytesIO()
    torch.save(3, value)
    (folder.parent / "outside").write_bytes(value.getvalue())
    metadata = metadata_in(folder)
    info = metadata.storage_data[MetadataIndex("train.epoch")]
    info.relative_path, info.offset, info.length = "../outside", 0, len(value.getvalue())
    write_metadata(folder, metadata)


def too_large(folder: Path, mark: Path) -> None:
    """A tensor that would fill any memory."""
    metadata = metadata_in(folder)
    entry = metadata.state_dict_metadata["model.0.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.size = torch.Size([2**40, 2**20])
    write_metadata(folder, metadata)


def hole(folder: Path, mark: Path) -> None:
    """A value fills the rest of the data file, of which nothing is stored."""
    metadata = metadata_in(folder)
    info = metadata.storage_data[MetadataIndex("train.epoch")]
    info.offset = (folder / DATA_FILE).stat().st_size
    info.length = 2**26 - info.offset
    os.truncate(folder / DATA_FILE, 2**26)
    write_metadata(folder, metadata)


def hole_without_manifest(folder: Path, mark: Path) -> None:
    """The same, of a size that no machine has."""
    hole(folder, mark)
    (folder / MANIFEST_FILE).unlink()
    metadata = metadata_in(folder)
    info = metadata.storage_data[MetadataIndex("train.epoch")]
    info.length = 2**42 - info.offset
    os.truncate(folder / DATA_FILE, 2**42)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def hole_of_metadata(folder: Path, mark: Path) -> None:
    os.truncate(folder / METADATA_FILE, 2**29)


def linked(folder: Path, mark: Path) -> None:
    """The data are a link to a file elsewhere."""
    (folder / DATA_FILE).rename(folder.parent / "data")
    (folder / DATA_FILE).symlink_to("../data")


def pipe(folder: Path, mark: Path) -> None:
    """The manifest is a named pipe that nobody writes to."""
    (folder / MANIFEST_FILE).unlink()
    os.mkfifo(folder / MANIFEST_FILE)


def deep_manifest(folder: Path, mark: Path) -> None:
    (folder / MANIFEST_FILE).write_text('{"step":' + '[{"a":' * 100_000 + "1" + "}]" * 100_000 + "}")


def huge_manifest(folder: Path, mark: Path) -> None:
    """No byte of it takes room on the disk."""
    with (folder / MANIFEST_FILE).open("wb") as file:
        file.truncate(2**33)


def manifest_outside(folder: Path, mark: Path) -> None:
    path = folder / MANIFEST_FILE
    manifest = StepManifest.model_validate_json(path.read_text())
    files = {**manifest.files, "/etc/hostname": next(iter(manifest.files.values()))}
    path.write_text(manifest.model_copy(update={"files": files}).text())


HOSTILE: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "metadata that are a call": (as_metadata, ".metadata is no metadata of a checkpoint: it holds `posix.mkdir`"),
    "a call within metadata": (within_metadata, ".metadata is no metadata of a checkpoint: it holds `posix.mkdir`"),
    "a path that leaves the folder": (elsewhere, ".metadata is no metadata of a checkpoint: it holds the file name"),
    "a tensor beyond all memory": (too_large, "has 9223372036854775808 bytes"),
    "a hole": (hole, f"{DATA_FILE} cannot be read: it has {2**26} bytes, of which "),
    "a hole without a manifest": (
        hole_without_manifest,
        f"{DATA_FILE} cannot be read: it has {2**42} bytes, of which ",
    ),
    "a hole for metadata": (hole_of_metadata, f".metadata cannot be read: it has {2**29} bytes, of which "),
    "a link": (linked, "__0_0.distcp cannot be read: it is a symbolic link"),
    "a named pipe": (pipe, "manifest.json cannot be read: it is no regular file"),
    "a deep manifest": (deep_manifest, "manifest.json cannot be read: Invalid JSON: recursion limit exceeded"),
    "a huge manifest": (huge_manifest, "manifest.json cannot be read: it has 8589934592 bytes, of which 0 are stored"),
    "a manifest of other files": (manifest_outside, "manifest.json names `'/etc/hostname'`"),
}
"""How a checkpoint is spoilt, and what is said about it before anything is loaded."""
