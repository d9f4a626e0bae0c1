"""Fields that an earlier version had, or had with another type, and where they went.

`disttrain validate` and the Python clients name the new field for an old one. The API server leaves the old ones of
stored jobs out once it has the new definition, as if nobody had set them. That must not start what was meant to wait:
such fields stay in the definition for a release, are refused in new jobs, and count in those that are stored
(`carried_over`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from disttrain_api.structural import UNKNOWN_FIELD
from disttrain_api.violation import Violation

_RULES = "spec.runPolicy.failurePolicy.rules[]"
_INDEX = re.compile(r"\[[0-9]+\]")

MOVED = {
    "spec.runPolicy.suspend": "it is `spec.suspend` now",
    "spec.runPolicy.managedBy": "it is `spec.managedBy` now",
    "spec.runPolicy.activeDeadlineSeconds": "it is `spec.activeDeadlineSeconds` now",
    "spec.runPolicy.ttlSecondsAfterFinished": "it is `spec.ttlSecondsAfterFinished` now",
    "spec.runPolicy.startDeadlineSeconds": "it is `spec.runPolicy.startingDeadlineSeconds` now",
    f"{_RULES}.exitCodes": f"it is `{_RULES}.onExitCodes` now, whose `operator` must be given",
    f"{_RULES}.podConditions": f"it is `{_RULES}.onPodConditions` now",
    "spec.runPolicy.schedulingPolicy.gang": "it is `spec.runPolicy.schedulingPolicy.gangScheduler` now",
    "spec.storage.size": "it is `spec.storage.volumeClaimTemplate` now, with the size in its `resources`",
    "spec.storage.storageClassName": "it is in the `spec` of `spec.storage.volumeClaimTemplate` now",
    "spec.storage.accessMode": "it is `accessModes`, a list, in the `spec` of `spec.storage.volumeClaimTemplate` now",
    "spec.storage.retain": "it is `spec.storage.retentionPolicy.whenDeleted` now: Retain or Delete",
}
"""What to do instead, by the field's path; `[]` is any item of a list."""

RESHAPED = {
    "spec.storage.retentionPolicy": "it is `spec.storage.retentionPolicy.whenDeleted` now",
}
"""What to do where a field that has fields of its own now holds a word, as it once did; by the field's path."""

CARRIED = {
    "spec.runPolicy.suspend": ("boolean", "spec.suspend"),
    "spec.runPolicy.managedBy": ("string", "spec.managedBy"),
    "spec.runPolicy.schedulingPolicy.gang": ("string", "spec.runPolicy.schedulingPolicy.gangScheduler"),
}
"""Type and new path, by the path, of the fields without which a stored job would start that was meant to wait."""
_AS_BY_DEFAULT = (False, "None")
_ABSENT = object()


def with_successor(violation: Violation) -> Violation:
    """Return the violation; of a field of an earlier version, with its successor as the hint."""
    path = _INDEX.sub("[]", violation.path)
    if violation.message == UNKNOWN_FIELD:
        successor = MOVED.get(path)
    else:
        successor = RESHAPED.get(path) if isinstance(violation.found, str) else None
    return violation if successor is None else replace(violation, hint=successor, meant=None)


def carried_over(spec: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a stored spec with what stands at former places where it is read now, and the former fields that count.

    One that says the same as its absence does not count; any other counts more than what stands at the new place, which
    the API server has filled in.
    """
    counting = []
    for former, (_, field) in CARRIED.items():
        place = former.split(".")[1:]
        value = _at(spec, place)
        if value is _ABSENT:
            continue
        spec = _with(spec, place, _ABSENT)
        if value not in _AS_BY_DEFAULT:
            spec = _with(spec, field.split(".")[1:], value)
            counting.append(former)
    return spec, tuple(counting)


def _at(node: Any, place: Sequence[str]) -> Any:
    for name in place:
        node = node.get(name, _ABSENT) if isinstance(node, Mapping) else _ABSENT
    return node


def _with(node: Any, place: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of an object with this value at this place; the objects above the place are there."""
    name, *below = place
    others = {key: one for key, one in node.items() if key != name}
    put = _with(node[name], below, value) if below else value
    return others if put is _ABSENT else {**others, name: put}
