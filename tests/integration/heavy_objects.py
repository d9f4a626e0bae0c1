"""Pods, Services and jobs of which one field, or all at once, are as large as an API server takes.

A row makes its field about as large as it is asked to; whether an API server takes so much of it only that one knows.
tests/unit/operator/test_any_field.py has every field there is, also those of which none takes much.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address
from random import Random
from typing import Any

from disttrain_api.names import API_VERSION, KIND, Label
from disttrain_api.ownership import owner_reference

Raw = dict[str, Any]
Fields = Callable[[int], Raw]
"""Bytes -> fields that take about as many as JSON."""

LARGEST = 1_400_000
"""etcd takes 1.5 MiB, of which what the API server adds is a part."""
ANNOTATIONS = 250_000
"""All of an object's may have 256 KiB."""
ALL = "everything"
COMPARED = 100_000
"""How many items an API server can compare each with all others: more take longer than a request may."""


def noise(length: int) -> str:
    """Text that no compression makes much shorter, the same each time."""
    return base64.urlsafe_b64encode(Random(length).randbytes(length * 3 // 4)).decode().replace("=", "")


def many(size: int, item: Callable[[int], Any]) -> list[Any]:
    """So many different items that they take about `size` bytes."""
    return [item(number) for number in range(10**6, 10**6 + max(1, size // (len(str(item(10**6))) + 2)))]


def many_keys(size: int, key: str = "example.com/k{}", value: str = "1") -> Raw:
    return dict(many(size, lambda number: (key.format(number), value)))


def joined(base: Any, more: Any) -> Any:
    """Both: objects key by key, lists one after the other."""
    if isinstance(base, dict) and isinstance(more, dict):
        return base | {key: joined(base[key], value) if key in base else value for key, value in more.items()}
    return [*base, *more] if isinstance(base, list) and isinstance(more, list) else more


def selected(size: int) -> Raw:
    return {"matchExpressions": many(size, lambda n: {"key": f"k{n}", "operator": "In", "values": ["a"]})}


def selected_by_values(size: int) -> Raw:
    return {"matchExpressions": [{"key": "a", "operator": "In", "values": many(size, lambda n: f"v{n}")}]}


def of_the_node(terms: Any, *, kind: str = "required") -> Raw:
    selector = {"nodeSelectorTerms": terms} if kind == "required" else terms
    return {"affinity": {"nodeAffinity": {f"{kind}DuringSchedulingIgnoredDuringExecution": selector}}}


def of_pods(which: str, terms: list[Raw]) -> Raw:
    terms = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}} | t for t in terms]
    return {"affinity": {which: {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}


def volume(**source: Any) -> Raw:
    """One volume, named by its kind."""
    (kind,) = source
    return {"volumes": [{"name": kind.lower(), **source}]}


def items(size: int) -> list[Raw]:
    return many(min(size, COMPARED), lambda n: {"key": f"k{n}", "path": f"p{n}"})


METADATA: Mapping[str, Fields] = {
    "labels": lambda size: {"labels": many_keys(size, value=noise(60).strip("-_"))},
    "annotations": lambda size: {"annotations": {"note": noise(min(size, ANNOTATIONS))}},
    "many-annotations": lambda size: {"annotations": many_keys(min(size, ANNOTATIONS))},
    "owners": lambda size: {
        "ownerReferences": many(
            size, lambda n: {"apiVersion": API_VERSION, "kind": KIND, "name": f"{n}", "uid": f"{n}-{noise(200)}"}
        )
    },
    "finalizers": lambda size: {"finalizers": many(size, lambda n: f"example.com/{n}")},
    "managed-fields": lambda size: {
        "managedFields": [
            {
                "manager": "me",
                "operation": "Update",
                "apiVersion": "v1",
                "fieldsType": "FieldsV1",
                "fieldsV1": dict(many(size, lambda n: (f"f:{n}", {}))),
            }
        ]
    },
}

CONTAINER: Mapping[str, Fields] = {
    "args": lambda size: {"args": [noise(size)]},
    "many-args": lambda size: {"args": [""] * (size // 4)},
    "command": lambda size: {"command": [noise(size)]},
    "image": lambda size: {"image": f"i:{noise(size)}"},
    "working-dir": lambda size: {"workingDir": f"/{noise(size)}"},
    "termination-message-path": lambda size: {"terminationMessagePath": f"/{noise(size)}"},
    "env": lambda size: {"env": many(size, lambda n: {"name": f"N{n}", "value": ""})},
    "env-value": lambda size: {"env": [{"name": "A", "value": noise(size)}]},
    "env-from": lambda size: {"envFrom": many(size, lambda n: {"configMapRef": {"name": f"c-{n}"}})},
    "ports": lambda size: {"ports": many(min(size, COMPARED), lambda n: {"containerPort": n % 65_000 + 1})},
    "resources": lambda size: {"resources": {key: many_keys(size // 2) for key in ("limits", "requests")}},
    "hook": lambda size: {"lifecycle": {"postStart": {"exec": {"command": [noise(size)]}}}},
    "hook-headers": lambda size: {
        "lifecycle": {"preStop": {"httpGet": {"port": 1, "httpHeaders": many(size, lambda n: header(f"X-{n}"))}}}
    },
    "probe": lambda size: {"startupProbe": {"exec": {"command": [noise(size)]}}},
    "probe-arguments": lambda size: {"livenessProbe": {"exec": {"command": ["a"] * (size // 5)}}},
    "probe-header": lambda size: {
        "readinessProbe": {"httpGet": {"port": 1, "httpHeaders": [header("X", noise(size))]}}
    },
    "capabilities": lambda size: {"securityContext": {"capabilities": {"add": many(size, lambda n: f"C{n}")}}},
    "seccomp": lambda size: {
        "securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": noise(size)}}
    },
}


def header(name: str, value: str = "") -> Raw:
    return {"name": name, "value": value}


POD: Mapping[str, Fields] = {
    "containers": lambda size: {"containers": many(size, lambda n: {"name": f"c{n}", "image": "i:1"})},
    "init-containers": lambda size: {"initContainers": many(size, lambda n: {"name": f"i{n}", "image": "i:1"})},
    "node-selector": lambda size: {"nodeSelector": many_keys(size)},
    "node-terms": lambda size: of_the_node(many(size, lambda n: selected(1))),
    "node-expressions": lambda size: of_the_node([selected(size)]),
    "node-values": lambda size: of_the_node([selected_by_values(size)]),
    "node-preferences": lambda size: of_the_node(
        many(size, lambda n: {"weight": 1, "preference": selected(1)}), kind="preferred"
    ),
    "pod-affinity": lambda size: of_pods("podAffinity", many(size, lambda n: {"topologyKey": f"a/{n}"})),
    "pod-anti-affinity": lambda size: of_pods("podAntiAffinity", many(size, lambda n: {"topologyKey": f"a/{n}"})),
    "pod-selector": lambda size: of_pods("podAffinity", [{"labelSelector": selected_by_values(size)}]),
    "pod-namespaces": lambda size: of_pods("podAntiAffinity", [{"namespaces": many(size, lambda n: f"n{n}")}]),
    "tolerations": lambda size: {"tolerations": many(size, lambda n: {"key": f"k{n}", "operator": "Exists"})},
    "host-aliases": lambda size: {"hostAliases": many(size, lambda n: {"ip": f"{IPv4Address(n)}", "hostnames": ["h"]})},
    "host-names": lambda size: {"hostAliases": [{"ip": "10.0.0.1", "hostnames": many(size, lambda n: f"h{n}")}]},
    "pull-secrets": lambda size: {"imagePullSecrets": many(size, lambda n: {"name": f"s{n}"})},
    "readiness-gates": lambda size: {"readinessGates": many(size, lambda n: {"conditionType": f"a.b/{n}"})},
    "spread": lambda size: {
        "topologySpreadConstraints": many(
            size, lambda n: {"maxSkew": 1, "topologyKey": f"a/{n}", "whenUnsatisfiable": "ScheduleAnyway"}
        )
    },
    "scheduling-gates": lambda size: {"schedulingGates": many(size, lambda n: {"name": f"example.com/{n}"})},
    "claims": lambda size: {"resourceClaims": many(size, lambda n: {"name": f"c{n}", "resourceClaimName": "x"})},
    "sysctls": lambda size: {"securityContext": {"sysctls": many(size, lambda n: {"name": f"net.a{n}", "value": "1"})}},
    "groups": lambda size: {"securityContext": {"supplementalGroups": many(size, lambda n: n)}},
    "resolver-options": lambda size: {"dnsConfig": {"options": many(size, lambda n: {"name": f"o{n}"})}},
    "volumes": lambda size: {"volumes": many(size, lambda n: {"name": f"v{n}", "emptyDir": {}})},
    "configuration-items": lambda size: volume(configMap={"name": "a", "items": items(size)}),
    "secret-items": lambda size: volume(secret={"secretName": "a", "items": items(size)}),
    "projections": lambda size: volume(projected={"sources": many(size, lambda n: {"configMap": {"name": f"c{n}"}})}),
    "driver-attributes": lambda size: volume(csi={"driver": "a.b", "volumeAttributes": many_keys(size)}),
    "driver-options": lambda size: volume(flexVolume={"driver": "a/b", "options": {"a": noise(size)}}),
}

SERVICE: Mapping[str, Fields] = {
    "ports": lambda size: {"ports": many(size, lambda n: {"name": f"p{n}", "port": n % 65_000 + 1})},
    "selector": lambda size: {"selector": many_keys(size)},
    "source-ranges": lambda size: {
        "type": "LoadBalancer",
        "allocateLoadBalancerNodePorts": False,
        "loadBalancerSourceRanges": many(size, lambda n: "10.0.0.0/8"),
    },
}

CONTAINER_STATUS = {"image": "i:1", "imageID": "", "ready": False, "restartCount": 0}
POD_STATUS: Mapping[str, Fields] = {
    "message": lambda size: {"message": noise(size)},
    "reason": lambda size: {"reason": noise(size)},
    "conditions": lambda size: {"conditions": many(size, lambda n: {"type": f"a.b/{n}", "status": "True"})},
    "condition-message": lambda size: {
        "conditions": [{"type": "PodScheduled", "status": "False", "message": noise(size)}]
    },
    "waiting-message": lambda size: {
        "containerStatuses": [container_status({"waiting": {"reason": "R", "message": noise(size)}})]
    },
    "last-words": lambda size: {
        "initContainerStatuses": [container_status({"terminated": {"exitCode": 1, "message": noise(size)}})]
    },
    "container-statuses": lambda size: {
        "initContainerStatuses": many(size, lambda n: container_status({}, name=f"c{n}"))
    },
}


def container_status(state: Raw, *, name: str = "trainer") -> Raw:
    return CONTAINER_STATUS | {"name": name, "state": state}


@dataclass(frozen=True)
class Heavy:
    """One object."""

    name: str
    collection: str
    """Path, with a place for the namespace's."""
    body: Fields
    status: Fields | None = None
    """What is written to its status, once it is there."""


def everything(rows: Mapping[str, Fields], size: int) -> Raw:
    """All of these fields at once, each with its share."""
    found: Raw = {}
    for fields in rows.values():
        found = joined(found, fields(size // len(rows)))
    return found


def all_at_once(heavy: Iterable[Heavy]) -> list[Heavy]:
    """Those of which all fields are large."""
    return [each for each in heavy if each.name.endswith(ALL)]


def of_one_and_of_all(rows: Mapping[str, Fields]) -> Iterator[tuple[str, Fields]]:
    yield from rows.items()
    yield ALL, partial(everything, rows)


def of(job: Raw, name: str) -> Raw:
    """Metadata of a child of this job that stays where the operator deletes it."""
    about = job["metadata"]
    labels = {Label.MANAGED_BY: Label.MANAGER, Label.JOB: about["name"], Label.JOB_UID: about["uid"]}
    labels |= {Label.ROLE: "worker", Label.INDEX: "0", Label.ATTEMPT: "9"}
    owner = owner_reference(about["name"], about["uid"])
    return {"name": name, "labels": labels, "ownerReferences": [owner], "finalizers": ["example.com/stays"]}


def nothing(_: int) -> Raw:
    return {}


def children(job: Raw) -> Iterator[Heavy]:
    """Pods and Services of this job."""
    yield from pods(job)
    yield from services(job)


def pods(job: Raw) -> Iterator[Heavy]:
    """Pods of this job."""

    def body(name: str, size: int, *, metadata: Fields = nothing, spec: Fields = nothing) -> Raw:
        base = {"containers": [{"name": "trainer", "image": "i:1"}]}
        return {"metadata": joined(of(job, name), metadata(size)), "spec": with_container(base, spec(size))}

    for name, fields in of_one_and_of_all(METADATA):
        yield Heavy(f"pod-{name}", "api/v1/{}/pods", partial(body, f"pod-{name}", metadata=fields))
    for name, fields in of_one_and_of_all(SPECS):
        yield Heavy(f"pod-spec-{name}", "api/v1/{}/pods", partial(body, f"pod-spec-{name}", spec=fields))
    for name, fields in of_one_and_of_all(POD_STATUS):
        yield Heavy(f"pod-status-{name}", "api/v1/{}/pods", partial(body, f"pod-status-{name}"), fields)


def services(job: Raw) -> Iterator[Heavy]:
    """Services of this job."""

    def body(name: str, size: int, *, metadata: Fields = nothing, spec: Fields = nothing) -> Raw:
        base = {"ports": [{"name": "a", "port": 1}]}
        return {"metadata": joined(of(job, name), metadata(size)), "spec": joined(base, spec(size))}

    for name, fields in of_one_and_of_all(METADATA):
        yield Heavy(f"service-{name}", "api/v1/{}/services", partial(body, f"service-{name}", metadata=fields))
    for name, fields in of_one_and_of_all(SERVICE):
        yield Heavy(f"service-spec-{name}", "api/v1/{}/services", partial(body, f"service-spec-{name}", spec=fields))


def jobs() -> Iterator[Heavy]:
    """Jobs of one pod, with a command of their own."""

    def body(name: str, size: int, *, metadata: Fields = nothing, spec: Fields = nothing) -> Raw:
        base = {"containers": [{"name": "trainer", "image": "registry.example/train:1", "command": ["train"]}]}
        template = {"spec": with_container(base, spec(size))}
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": joined({"name": name}, metadata(size)),
            "spec": {"workers": {"replicas": 1, "template": template}},
        }

    collection = f"apis/{API_VERSION}/{{}}/disttrainingjobs"
    for name, fields in of_one_and_of_all(METADATA):
        yield Heavy(f"job-{name}", collection, partial(body, f"job-{name}", metadata=fields))
    rows = {name: fields for name, fields in SPECS.items() if name not in FEW_IN_A_JOB}
    for name, fields in of_one_and_of_all(rows):
        yield Heavy(f"job-spec-{name}", collection, partial(body, f"job-spec-{name}", spec=fields))


def in_container(fields: Fields) -> Fields:
    return lambda size: {"container": fields(size)}


FEW_IN_A_JOB = ("containers", "init-containers", "volumes", "container-env", "container-termination-message-path")
"""A job's definition allows 16 to 256 of them, and so many characters of the path."""
SPECS: Mapping[str, Fields] = {**POD, **{f"container-{name}": in_container(row) for name, row in CONTAINER.items()}}


def with_container(base: Raw, change: Raw) -> Raw:
    """A pod's spec with the change laid over it, and what it says of the container in the first one."""
    rest = {key: value for key, value in change.items() if key != "container"}
    (container,) = base["containers"]
    return joined(base | {"containers": [joined(container, change.get("container", {}))]}, rest)
