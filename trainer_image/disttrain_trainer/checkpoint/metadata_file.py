"""`.metadata` of a checkpoint: what metadata_pickle.py has read of it is checked, field by field, before it is used."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from disttrain_trainer.checkpoint.metadata_parts import NotMetadata, typed
from disttrain_trainer.checkpoint.metadata_pickle import Reader
from disttrain_trainer.runtime.errors import shown
from disttrain_trainer.runtime.files import is_plain_name

_PART_BYTES = 16
"""A part takes more in a pickle, also where all that it holds is named again."""
_PROPERTIES: dict[str, type] = {
    "layout": torch.layout, "requires_grad": bool, "memory_format": torch.memory_format, "pin_memory": bool,
}  # fmt: skip


def metadata_of(data: bytes) -> Metadata:
    """Return the Metadata in the bytes of a `.metadata` file. Raises NotMetadata, which says what was found instead."""
    try:
        found = Reader(data).read()
        if not isinstance(found, Metadata):
            raise NotMetadata(f"an object of type {type(found).__name__}")
        return _checked(found, len(data))
    except NotMetadata:
        raise
    # Whatever goes wrong in an instruction: a missing operand, an index beyond the end, text that is no UTF-8.
    except Exception as error:
        raise NotMetadata(f"something else: {type(error).__name__}") from error


def _checked(metadata: Metadata, length: int) -> Metadata:
    """Return the metadata without unused fields. Raises NotMetadata for a field that is missing or has another type.

    length: bytes of the file, of which each part of a tensor takes some.
    """
    # An object that the file has not filled has no fields at all.
    fields = vars(metadata)
    entries = typed(fields.get("state_dict_metadata"), dict, "`state_dict_metadata`")
    parts = 0
    for name, entry in entries.items():
        typed(name, str, "a name")
        if type(entry) is TensorStorageMetadata:
            parts += len(typed(vars(entry).get("chunks"), list, f"the parts of `{shown(name)}`"))
            # A load does much for each of them.
            if parts * _PART_BYTES > length:
                raise NotMetadata(
                    f"{parts} parts of tensors in a file of {length} bytes, expected at least {_PART_BYTES} for each"
                )
            _check_tensor(name, entry)
        else:
            typed(entry, BytesStorageMetadata, f"`{shown(name)}`")
    stored = typed(fields.get("storage_data"), dict, "`storage_data`")
    for index, info in stored.items():
        typed(index, MetadataIndex, "a key of `storage_data`")
        _check_place(typed(info, _StorageInfo, "a value of `storage_data`"))
    version = fields.get("version")
    return Metadata(entries, {}, stored, StorageMeta(), version if isinstance(version, str) else None)


def _check_tensor(name: str, entry: TensorStorageMetadata) -> None:
    fields, what = vars(entry), f"of `{shown(name)}`"
    properties = typed(fields.get("properties"), TensorProperties, f"the format {what}")
    for name_of, kind in _PROPERTIES.items():
        if name_of in vars(properties):
            typed(vars(properties)[name_of], kind, f"`{name_of}` {what}")
    typed(vars(properties).get("dtype"), torch.dtype, f"`dtype` {what}")
    size = typed(fields.get("size"), torch.Size, f"the shape {what}")
    for chunk in fields["chunks"]:
        bounds = vars(typed(chunk, ChunkStorageMetadata, f"a part {what}"))
        for bound in ("offsets", "sizes"):
            if len(typed(bounds.get(bound), torch.Size, f"`{bound}` {what}")) != len(size):
                raise NotMetadata(f"a part {what} with another number of dimensions")


def _check_place(info: _StorageInfo) -> None:
    fields = vars(info)
    name = typed(fields.get("relative_path"), str, "the name of a file")
    file = f"`{shown(name)}`"
    if not is_plain_name(name):
        raise NotMetadata(f"the file name {file}, which is no name in the checkpoint's own folder")
    for bound in ("offset", "length"):
        if typed(fields.get(bound), int, f"`{bound}` in {file}") < 0:
            raise NotMetadata(f"a negative `{bound}` in {file}")
    if fields.get("transform_descriptors"):
        raise NotMetadata(f"a part of {file} that is compressed or encrypted")
