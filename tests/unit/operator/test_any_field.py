"""Whatever field of an object a tenant makes as large as an API server takes, what is kept of it is bounded.

Fields come from schemas: of a pod's spec from that of the repository, of a job from its definition. Metadata and status
of a pod are listed here, from core/v1.
"""

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from disttrain_api.crd import custom_resource_definition
from disttrain_api.names import AGENT_PORT, CONTAINER, GANG_GATE, QUEUE_NAME_LABEL, Annotation, Env, Label
from disttrain_api.ownership import owner_reference
from disttrain_operator import kept_cluster, kept_job, kept_pod
from disttrain_operator.kube.sizes import TooMuch, size_of
from tests.builders import UID, a_job, a_raw_job, a_raw_pod, ended, merge
from tools.cluster.paths import REPOSITORY

Raw = dict[str, Any]
Schema = dict[str, Any]
Path = tuple[str, ...]

LARGE = 1_400_000
"""An API server stores 1.5 MiB of an object."""
TEXT = Random(1).randbytes(LARGE // 2).hex()
MANY = {f"key-{number:06}": "" for number in range(LARGE // 16)}
ITEM = "[]"
"""Stands in a path for an item of a list."""
# The API server bounds these, or writes them itself.
TIME = 20
SHORT = {"name": 253, "namespace": 63, "uid": 36, "creationTimestamp": TIME, "deletionTimestamp": TIME}
LABEL = 63


def fields(*texts: str, **others: Schema) -> Schema:
    return {"type": "object", "properties": {**{text: {"type": "string"} for text in texts}, **others}}


def several(items: Schema | None = None) -> Schema:
    return {"type": "array", "items": items or {"type": "string"}}


MAP: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
NUMBER: Schema = {"type": "integer"}
OWNER = fields("apiVersion", "kind", "name", "uid")
MANAGED = fields("manager", "operation", "apiVersion", "time", "fieldsType", "subresource", fieldsV1=MAP)
METADATA = fields(
    *SHORT,
    *("generateName", "selfLink"),
    labels=MAP,
    annotations=MAP,
    ownerReferences=several(OWNER),
    finalizers=several(),
    managedFields=several(MANAGED),
    generation=NUMBER,
    deletionGracePeriodSeconds=NUMBER,
)
STATE = fields(
    waiting=fields("reason", "message"),
    running=fields("startedAt"),
    terminated=fields("reason", "message", "startedAt", "finishedAt", "containerID", exitCode=NUMBER, signal=NUMBER),
)
CONTAINER_STATUS = fields(
    *("name", "image", "imageID", "containerID", "stopSignal"),
    state=STATE,
    lastState=STATE,
    allocatedResources=MAP,
    resources=fields(limits=MAP, requests=MAP, claims=several(fields("name", "request"))),
    volumeMounts=several(fields("name", "mountPath", "recursiveReadOnly")),
    user=fields(linux=fields(supplementalGroups=several(NUMBER))),
    allocatedResourcesStatus=several(fields("name", resources=several(fields("resourceID", "health")))),
)
CONDITION = fields("type", "status", "reason", "message", "lastProbeTime", "lastTransitionTime")
STATUS = fields(
    *("phase", "message", "reason", "nominatedNodeName", "hostIP", "podIP", "startTime", "qosClass", "resize"),
    conditions=several(CONDITION),
    podIPs=several(fields("ip")),
    hostIPs=several(fields("ip")),
    initContainerStatuses=several(CONTAINER_STATUS),
    containerStatuses=several(CONTAINER_STATUS),
    ephemeralContainerStatuses=several(CONTAINER_STATUS),
    resourceClaimStatuses=several(fields("name", "resourceClaimName")),
    extendedResourceClaimStatus=fields("resourceClaimName", requestMappings=several(fields("containerName"))),
)

# What makes somebody read the item of a list, or a map.
ITEMS: dict[str, Raw] = {
    "containers": {"name": CONTAINER},
    "containerStatuses": {"name": CONTAINER},
    "initContainerStatuses": {"name": "x", "state": {"waiting": {"reason": "ErrImagePull"}}},
    "env": {"name": Env.AGENT_PORT, "value": str(AGENT_PORT)},
    "conditions": {"type": "PodScheduled", "status": "False"},
    "ownerReferences": owner_reference("digits", UID),
    "schedulingGates": {"name": GANG_GATE},
    "matchExpressions": {"key": "a", "operator": "In"},
    "matchFields": {"key": "metadata.name", "operator": "In"},
}
KEYS: dict[str, tuple[str, ...]] = {
    "labels": (Label.ROLE, Label.INDEX, Label.ATTEMPT, Label.TOPOLOGY_GROUP, QUEUE_NAME_LABEL),
    "annotations": (Annotation.RELEASED_AT, Annotation.RESERVED_NODE, Annotation.NOT_ON),
}


def large(schema: Schema, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each field below `path`, with values as large as there may be."""
    name = path[-1] if path else ""
    if isinstance(schema.get("items"), dict):
        base = ITEMS.get(name, {})
        for inner, value in large(schema["items"], (*path, ITEM)):
            merged = merge(base, value) if isinstance(value, dict) else value
            yield inner, [merged]
        least: Any = {} if "properties" in schema["items"] else ""
        yield (*path, ITEM), [base or least] * (LARGE // len(json.dumps(base or least)))
    for key, part in (schema.get("properties") or {}).items():
        yield from ((inner, {key: value}) for inner, value in large(part, (*path, key)))
    if "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields"):
        yield path, MANY
        yield from ((path, {key: TEXT[: LABEL if name == "labels" else LARGE]}) for key in KEYS.get(name, ()))
        yield path, {"another": TEXT}
        yield path, {TEXT[:LARGE]: ""}
    if schema.get("type") == "string":
        yield path, TEXT[: SHORT.get(name, LARGE)] if path[0] == "metadata" and len(path) == 2 else TEXT
    elif "type" not in schema:
        yield path, TEXT  # a quantity, or a number or a name
    elif schema["type"] in ("integer", "number"):
        yield path, 2**63 - 1


def pod_schema() -> Schema:
    template = json.loads((REPOSITORY / "api/disttrain_api/pod_template.json").read_text())
    return fields(metadata=METADATA, spec=template["properties"]["spec"], status=STATUS)


def job_schema() -> Schema:
    definition = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    spec = definition["spec"]["properties"]
    # It is the same template twice.
    spec["parameterServers"]["properties"].pop("template")
    return fields(metadata=METADATA, spec=definition["spec"], status=definition["status"])


def laid_over(base: Any, change: Any) -> Any:
    """`change` laid over `base`, which is not changed; a list of one item over the first item of a list."""
    if isinstance(base, dict) and isinstance(change, dict):
        return {**base, **{key: laid_over(base.get(key), value) for key, value in change.items()}}
    return change


def a_pod(**spec: Any) -> Raw:
    pod = ended(a_raw_pod(a_job()), 1, message="last words")
    pod["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    return laid_over(pod, {"spec": {"nodeName": None, **spec}, "status": {"phase": "Pending"}})


GATED = a_pod(schedulingGates=[{"name": GANG_GATE}])
RELEASED = merge(a_pod(), {"metadata": {"annotations": {Annotation.RESERVED_NODE: "n"}}})
BOUND = a_pod(nodeName="n")
HELD = ("spec.affinity.nodeAffinity.required", "spec.schedulingGates")
Case = tuple[Callable[[Raw], Raw], Raw, Callable[[], Schema], int, int, tuple[str, ...]]
CASES: dict[str, Case] = {
    "job": (kept_job.keep, a_raw_job(), job_schema, kept_job.MAX_KEPT, 1_000, ("status",)),
    "gated pod": (kept_pod.keep_pod, GATED, pod_schema, kept_pod.MAX_KEPT, 900, HELD),
    "pod": (kept_pod.keep_pod, BOUND, pod_schema, kept_pod.MAX_KEPT, 900, ("spec.schedulingGates",)),
    "service": (kept_pod.keep_service, GATED, lambda: fields(metadata=METADATA), kept_pod.MAX_KEPT, 30, ()),
    "gated pod at the gate": (kept_cluster.trim_cluster_pod, GATED, pod_schema, kept_cluster.MAX_KEPT, 900, ()),
    "released pod at the gate": (kept_cluster.trim_cluster_pod, RELEASED, pod_schema, kept_cluster.MAX_KEPT, 900, ()),
    "pod at the gate": (kept_cluster.trim_cluster_pod, BOUND, pod_schema, kept_cluster.MAX_KEPT, 900, ()),
}


@pytest.mark.parametrize(("keep", "base", "schema", "most", "at_least", "may_be_refused"), CASES.values(), ids=CASES)
def test_whatever_field_is_large_what_is_kept_is_bounded(keep, base, schema, most, at_least, may_be_refused):
    """`may_be_refused`: fields of which so much is needed that the object is kept as a name where they are large. Red
    where a text is kept as long as it is."""
    tried, too_large, not_kept = 0, dict[str, int](), dict[str, str]()
    for path, change in large(schema()):
        tried += 1
        try:
            kept = keep(laid_over(base, change))
        except TooMuch as error:
            not_kept[".".join(path)] = str(error)
            continue
        size = size_of(kept)
        if size > most or keep(kept) != kept:
            too_large[".".join(path)] = size
    assert too_large == {}
    assert tried > at_least
    assert all("at most" in why for why in not_kept.values())
    assert {field for field in not_kept if not field.startswith(may_be_refused)} == set()
