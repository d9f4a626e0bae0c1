"""What the API server wrote down of the operator's requests."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Raw = dict[str, Any]


def entries_of_operator(audit_log: Path, namespace: str | None = None) -> Iterator[Raw]:
    """Completed requests, in a namespace or anywhere."""
    for line in audit_log.read_text().splitlines():
        entry = json.loads(line)
        about = entry.get("objectRef") or {}
        own = entry.get("userAgent", "").startswith("disttrain-operator") and entry["stage"] == "ResponseComplete"
        if own and namespace in (None, about.get("namespace")):
            yield entry


def requests_of_operator(audit_log: Path, namespace: str) -> Counter[tuple[str, str, int]]:
    """What the operator asked in a namespace: (verb, resource, status code) -> how often."""
    counted: Counter[tuple[str, str, int]] = Counter()
    for entry in entries_of_operator(audit_log, namespace):
        about = entry["objectRef"]
        resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
        counted[entry["verb"], resource, entry["responseStatus"]["code"]] += 1
    return counted


def created(audit_log: Path, namespace: str, resource: str) -> Counter[str]:
    """Names of the objects that the operator made -> how often the API server let it."""
    return Counter(
        entry["objectRef"]["name"]
        for entry in entries_of_operator(audit_log, namespace)
        if entry["verb"] == "create"
        and entry["objectRef"]["resource"] == resource
        and entry["responseStatus"]["code"] == 201
    )
