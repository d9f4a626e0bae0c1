"""Fields that an earlier version had, or had with another type, and where they went.

`disttrain validate` names the new field for an old one. The API server does not use this table: `kubectl` names the
unknown field only.
"""

import re
from dataclasses import replace

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
    "spec.storage.storageClassName": "it stands in the `spec` of `spec.storage.volumeClaimTemplate` now",
    "spec.storage.accessMode": "it is `accessModes`, a list, in the `spec` of `spec.storage.volumeClaimTemplate` now",
    "spec.storage.retain": "it is `spec.storage.retentionPolicy.whenDeleted` now: Retain or Delete",
    "spec.parallelism.contextParallelDegree": "it comes with context parallelism; only 1 was accepted: remove it",
}
"""What to do instead, by the field's path; `[]` is any item of a list."""

RESHAPED = {
    "spec.storage.retentionPolicy": "it is `spec.storage.retentionPolicy.whenDeleted` now",
}
"""What to do where a field that has fields of its own now holds a word, as it once did; by the field's path."""


def with_successor(violation: Violation) -> Violation:
    """Return the violation; of a field of an earlier version, with its successor as the hint."""
    path = _INDEX.sub("[]", violation.path)
    if violation.message == UNKNOWN_FIELD:
        successor = MOVED.get(path)
    else:
        successor = RESHAPED.get(path) if isinstance(violation.found, str) else None
    return violation if successor is None else replace(violation, hint=successor, meant=None)
