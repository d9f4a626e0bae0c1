"""Labels and annotations that the operator alone sets, for rules about all metadata that a job can carry."""

from collections.abc import Mapping
from typing import Any

from disttrain_api.names import RESERVED_PREFIX, Label

# CEL: the key (k) of an annotation, and of a label, is reserved.
RESERVED_ANNOTATION = f"k.startsWith('{RESERVED_PREFIX}')"
RESERVED_LABEL = f"{RESERVED_ANNOTATION} || k == '{Label.MANAGED_BY}'"


def has_reserved_label(metadata: Mapping[str, Any]) -> bool:
    """Return whether the metadata has a label that the operator alone sets. Labels of the wrong type have none."""
    return any(key.startswith(RESERVED_PREFIX) or key == Label.MANAGED_BY for key in _keys(metadata, "labels"))


def has_reserved_annotation(metadata: Mapping[str, Any]) -> bool:
    """Return whether the metadata has an annotation that the operator alone sets."""
    return any(key.startswith(RESERVED_PREFIX) for key in _keys(metadata, "annotations"))


def metadata_is_reserved(path: str) -> str:
    """Return a CEL expression: the metadata at `path`, which is there, has a reserved label or annotation."""
    return (
        f"((has({path}.labels) && {path}.labels.exists(k, {RESERVED_LABEL}))"
        f" || (has({path}.annotations) && {path}.annotations.exists(k, {RESERVED_ANNOTATION})))"
    )


def _keys(metadata: Mapping[str, Any], part: str) -> list[str]:
    found = metadata.get(part)
    return list(found) if isinstance(found, Mapping) else []
