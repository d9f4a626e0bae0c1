"""The schema of a pod template: the API server's own, without what a job does not need.

    kubectl get --raw /openapi/v3/api/v1 | python -m disttrain_api.pod_template > api/disttrain_api/pod_template.json

`make generate-pod-template` does so for the cluster of KUBECONFIG. Descriptions are left out: with those of two pod
templates the CustomResourceDefinition would be too large for a client-side `kubectl apply`.
"""

import copy
import json
import sys
from functools import cache
from importlib import resources
from typing import Any

Schema = dict[str, Any]

_PREFIX = "#/components/schemas/"
_POD_TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"
_OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"

_KEPT = (
    "type",
    "format",
    "enum",
    "required",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
)

# Only these fields of a template's metadata reach a pod: the operator sets the rest. More than any pod has would make
# the API server take every CEL rule over them for too expensive.
_METADATA: Schema = {
    "type": "object",
    "properties": {
        key: {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 256}
        for key in ("labels", "annotations")
    },
}
# The API server's own pattern lets through 1e10000000, and exponents with a fraction, which no pod may ask for.
_NUMBER = r"([0-9]{1,32}(\.[0-9]{0,32})?|\.[0-9]{1,32})"
_QUANTITY_SCHEMA: Schema = {
    "x-kubernetes-int-or-string": True,
    "pattern": rf"^[+-]?{_NUMBER}([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{{1,2}})?$",
}

# Kinds of volumes that no supported version of Kubernetes can mount any more.
_GONE_VOLUMES = (
    "cephfs", "flocker", "gitRepo", "glusterfs", "photonPersistentDisk", "quobyte", "rbd", "scaleIO", "storageos",
)  # fmt: skip
# Bounds that no pod comes near to; without them the API server takes every CEL rule over these lists for too expensive.
_MAX_ITEMS = {"containers": 16, "initContainers": 16, "env": 256, "volumes": 128}
_MAX_NAME_LENGTH = {"containers": 63, "initContainers": 63, "env": 256, "volumes": 63}


@cache
def pod_template_schema() -> Schema:
    """The structural schema of `workers.template` and `parameterServers.template`. Not to be changed by the caller."""
    schema: Schema = json.loads(resources.files("disttrain_api").joinpath("pod_template.json").read_text("utf-8"))
    return schema


def trainer_schema() -> dict[str, Schema]:
    """The schemas of a container's fields, by name. Not to be changed by the caller."""
    containers = pod_template_schema()["properties"]["spec"]["properties"]["containers"]
    fields: dict[str, Schema] = containers["items"]["properties"]
    return fields


@cache
def claim_template_schema() -> Schema:
    """The structural schema of `storage.volumeClaimTemplate`. Not to be changed by the caller."""
    volume = pod_template_schema()["properties"]["spec"]["properties"]["volumes"]["items"]["properties"]
    schema: Schema = copy.deepcopy(volume["ephemeral"]["properties"]["volumeClaimTemplate"])
    modes = schema["properties"]["spec"]["properties"]["accessModes"]
    modes |= {"maxItems": 8, "items": {"type": "string", "maxLength": 32}}
    return schema


def from_openapi(document: dict[str, Any]) -> Schema:
    """The template's schema out of the API server's /openapi/v3/api/v1."""
    schema = _reduce({"$ref": _PREFIX + _POD_TEMPLATE}, document["components"]["schemas"])
    pod = schema["properties"]["spec"]
    # Everything may be absent: the operator fills in a container `trainer` with its default image.
    pod["required"] = [name for name in pod.pop("required", []) if name != "containers"]
    if not pod["required"]:
        del pod["required"]
    # A pod cannot be created with these.
    del pod["properties"]["ephemeralContainers"]
    volume = pod["properties"]["volumes"]["items"]["properties"]
    for name in _GONE_VOLUMES:
        volume.pop(name, None)
    # Bounds its length, so that a rule may print it.
    pod["properties"]["restartPolicy"]["enum"] = ["Always", "OnFailure", "Never"]
    _bound(pod)
    return schema


def _reduce(node: Schema, schemas: dict[str, Schema]) -> Schema:
    """A structural schema: references resolved, only what validates kept."""
    reference = node.get("$ref") or next((part["$ref"] for part in node.get("allOf", []) if "$ref" in part), None)
    if reference is not None:
        name = reference.removeprefix(_PREFIX)
        if name == _OBJECT_META:
            return json.loads(json.dumps(_METADATA))  # type: ignore[no-any-return]
        if name == _QUANTITY:
            return dict(_QUANTITY_SCHEMA)
        return _reduce(schemas[name], schemas)
    if node.get("format") == "int-or-string":
        return {"x-kubernetes-int-or-string": True}  # the types are said by that
    reduced: Schema = {key: node[key] for key in _KEPT if key in node}
    if "properties" in node:
        reduced["properties"] = {key: _reduce(value, schemas) for key, value in node["properties"].items()}
    if "items" in node:
        reduced["items"] = _reduce(node["items"], schemas)
        _default_keys(reduced, _resolve(node["items"], schemas))
    if "additionalProperties" in node:
        reduced["additionalProperties"] = _reduce(node["additionalProperties"], schemas)
    return reduced


def _resolve(node: Schema, schemas: dict[str, Schema]) -> Schema:
    reference = node.get("$ref") or next((part["$ref"] for part in node.get("allOf", []) if "$ref" in part), None)
    return schemas[reference.removeprefix(_PREFIX)] if reference else node


def _default_keys(array: Schema, items: Schema) -> None:
    """Keys of a list must be required or have a default. All other defaults are left to the pods themselves.

    The document has `default: ""` on most strings, which no enum allows.
    """
    for key in array.get("x-kubernetes-list-map-keys", []):
        if key not in items.get("required", []):
            array["items"]["properties"][key]["default"] = items["properties"][key]["default"]


def _bound(pod: Schema) -> None:
    for key in ("containers", "initContainers", "volumes"):
        _bound_list(pod["properties"], key)
    for key in ("containers", "initContainers"):
        _bound_list(pod["properties"][key]["items"]["properties"], "env")


def _bound_list(properties: dict[str, Schema], key: str) -> None:
    properties[key]["maxItems"] = _MAX_ITEMS[key]
    properties[key]["items"]["properties"]["name"]["maxLength"] = _MAX_NAME_LENGTH[key]


if __name__ == "__main__":
    print(json.dumps(from_openapi(json.load(sys.stdin)), indent=1, sort_keys=True))
