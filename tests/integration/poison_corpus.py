"""Objects that were made to stop an operator, as data: what they are, and where they are put.

Everything is stored as it stands: jobs and statuses while the definition has no schema (as if an earlier version had
let them in), reports as the last words of pods of valid jobs, the others as what any tenant may make.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.builders import a_claim_template
from tests.integration.heavy_objects import noise

Raw = dict[str, Any]

DEEP = (64, 300, 900, 990, 1023, 1100, 3000)
FAR = 2**63 - 1
OWN = "own"
"""Name of a valid job of the tenant, to whose children the others are made."""


@dataclass(frozen=True)
class Poison:
    """One object."""

    name: str
    text: str
    """JSON: of a job's spec, of a status, of an object; of a report the message as it stands."""


def _nested(levels: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * levels + "1" + closing * levels


def _training(**changes: str) -> str:
    """A spec that trains, with parts given as JSON."""
    parts = {"model": '{"name":"mlp"}', "data": '{"name":"digits"}', "steps": "10", "microBatchSize": "4"} | changes
    return '{"workers":{"replicas":1},"training":{' + ",".join(f'"{key}":{text}' for key, text in parts.items()) + "}}"


def command(**changes: Any) -> Raw:
    container = {"name": "trainer", "image": "registry.example/train:1", "command": ["train"]}
    return {"workers": {"replicas": 1, "template": {"spec": {"containers": [container]}}}} | changes


def _spec(**changes: Any) -> str:
    return json.dumps(command(**changes))


def _workers(**changes: Any) -> str:
    base = command()
    return json.dumps(base | {"workers": base["workers"] | changes})


def specs() -> Iterator[Poison]:
    """Specs of jobs."""
    for levels in DEEP:
        yield Poison(f"objects-{levels}-deep", _training(model=f'{{"name":"mlp","config":{_nested(levels)}}}'))
    for levels in (900, 1100):
        lists = _nested(levels, "[", "]")
        yield Poison(f"lists-{levels}-deep", _training(data=f'{{"name":"digits","config":{{"a":{lists}}}}}'))
    wide = json.dumps({f"key{number}": number for number in range(20_000)})
    yield Poison("unknown-fields", _training(model=f'{{"name":"mlp","config":{wide}}}'))
    empty = "[" + ",".join(["[]"] * 300_000) + "]"
    for number in range(3):
        yield Poison(f"a-megabyte-of-lists-{number}", _training(model=f'{{"name":"mlp","config":{{"x":{empty}}}}}'))
    yield Poison("a-long-string", _training(model=json.dumps({"name": "x" * 400_000})))
    at_the_limit = {"name": "mlp", "config": {"x": noise(1_400_000)}}
    yield Poison("a-job-as-large-as-can-be", _training(model=json.dumps(at_the_limit)))
    yield Poison("a-template-1100-deep", f'{{"workers":{{"replicas":1,"template":{_nested(1100)}}}}}')
    for name, text in (
        ("null", "null"),
        ("a-string", '"spec"'),
        ("a-list", "[]"),
        ("nothing", "{}"),
        ("a-number", "7"),
    ):
        yield Poison(f"spec-is-{name}", text)
    for name, replicas in (("negative", -1), ("many", 10**12), ("huge", FAR), ("a-float", 1e308), ("a-word", "two")):
        yield Poison(f"replicas-{name}", _workers(replicas=replicas))
    yield Poison("workers-are-a-list", json.dumps({"workers": []}))
    yield Poison("template-is-a-list", _workers(template=[]))
    yield Poison("containers-are-a-word", _workers(template={"spec": {"containers": "all"}}))
    yield Poison("containers-are-null", _workers(template={"spec": {"containers": [None, 1, {"name": 7}]}}))
    yield Poison(
        "odd-labels", _workers(template={"metadata": {"labels": {"disttrain.io/attempt": "9", "a": "\u202e"}}})
    )
    yield Poison("steps-beyond-everything", _training(steps=str(10**40)))
    yield Poison("steps-with-an-exponent", _training(steps="1e300"))
    yield Poison("managed-by-an-object", _spec(managedBy={}))
    yield Poison("suspend-is-a-word", _spec(suspend="yes"))
    yield Poison("a-gang-of-no-kind", _spec(runPolicy={"schedulingPolicy": {"gangScheduler": "Everything"}}))
    yield Poison("a-negative-deadline", _spec(activeDeadlineSeconds=-(2**63)))
    yield Poison(
        "a-gate-of-everything", _spec(runPolicy={"schedulingPolicy": {"gangScheduler": "Gate", "topology": []}})
    )
    yield Poison(
        "storage-of-no-size", _spec(storage=a_claim_template(resources={"requests": {"storage": "1Zi\n\u0001"}}))
    )


def managed_fields(levels: int) -> str:
    """What a client says of the fields that it manages: no schema bounds it, on objects of any kind."""
    fields = '{"f:a":' * levels + "{}" + "}" * levels
    manager = '"manager":"me","operation":"Update","fieldsType":"FieldsV1"'
    return f'"managedFields":[{{{manager},"fieldsV1":{fields}}}]'


def statuses() -> Iterator[Poison]:
    """Statuses of jobs that are valid otherwise."""
    condition = {
        "type": "Running",
        "status": "True",
        "reason": "R",
        "message": "m",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }
    attempt = {"number": 1, "startTime": "2026-01-01T00:00:00Z"}
    verdict = {"reason": "R", "message": "m"}
    for name, status in (
        ("phase-of-another-version", {"phase": "Queued"}),
        ("condition-of-another-version", {"conditions": [condition | {"type": "Healing"}]}),
        ("condition-of-no-status", {"conditions": [condition | {"status": "Maybe"}]}),
        ("conditions-are-a-word", {"conditions": "good"}),
        ("condition-without-a-time", {"conditions": [condition | {"lastTransitionTime": "soon"}]}),
        ("attempt-is-a-word", {"attempt": "seven"}),
        ("attempt-is-negative", {"attempt": -1}),
        ("attempt-is-huge", {"attempt": FAR, "attempts": [attempt | {"number": FAR}]}),
        ("many-attempts", {"attempt": 3000, "attempts": [attempt | {"number": n} for n in range(3000)]}),
        ("attempt-without-a-number", {"attempt": 1, "attempts": [{"startTime": None}]}),
        ("attempt-began-soon", {"attempt": 1, "attempts": [attempt | {"startTime": "soon"}]}),
        (
            "verdict-of-another-version",
            {"attempt": 1, "attempts": [attempt | {"verdict": verdict | {"class": "Cosmic", "action": "Pray"}}]},
        ),
        ("checkpoint-before-the-first", {"checkpoint": {"step": -5, "path": "/" * 50_000, "time": "then"}}),
        ("progress-of-words", {"progress": {"step": "many", "totalSteps": [], "updateTime": 5}}),
        ("many-metrics", {"progress": {"step": 1, "totalSteps": 2, "metrics": [{"name": "a", "value": 1}] * 5000}}),
        ("role-of-another-version", {"replicaStatuses": [{"role": "gardener", "active": -7}]}),
        ("status-is-a-list", []),
        ("counts-are-huge", {"restarts": FAR, "restartsSinceCheckpoint": FAR, "worldSize": FAR}),
        ("replacements-of-nothing", {"attempt": 1, "attempts": [attempt | {"replacements": [{}, None, 3]}]}),
        ("finished-in-another-century", {"completionTime": "9999-99-99T99:99:99Z"}),
    ):
        yield Poison(name, json.dumps(status))
    yield Poison("status-1100-deep", '{"mesh":' + _nested(1100) + "}")


def reports() -> Iterator[Poison]:
    """Last words of pods."""
    checkpoint = {"step": 5, "path": "/checkpoints/x/step-5", "time": "2026-01-01T00:00:00Z"}
    progress = {"rank": 0, "step": 5, "totalSteps": 10}
    for name, report in (
        ("step-beyond-64-bits", {"progress": progress | {"step": 10**30}}),
        ("step-is-negative", {"progress": progress | {"step": -5}}),
        ("checkpoint-of-some-day", {"progress": progress | {"checkpoint": checkpoint | {"time": "yesterday"}}}),
        ("checkpoint-beyond-everything", {"progress": progress | {"checkpoint": checkpoint | {"step": 10**18}}}),
        ("failure-is-a-list", {"failure": []}),
        ("rank-is-huge", {"failure": {"rank": 10**25, "reason": "R", "message": "m"}}),
        ("reason-is-long", {"failure": {"rank": 0, "reason": "R" * 3000, "message": "\u202e"}}),
        ("figures-are-many", {"progress": progress | {"metrics": {f"m{n}": n for n in range(200)}}}),
    ):
        yield Poison(name, json.dumps(report))
    yield Poison(
        "loss-is-nan", '{"progress":{"rank":0,"step":5,"totalSteps":10,"loss":NaN,"samplesPerSecond":Infinity}}'
    )
    yield Poison("report-1300-deep", _nested(1300, "[", "]"))
    yield Poison("report-is-null", "null")
    yield Poison("report-is-garbage", "\x01\ufffd{" * 900)


_OWNER_CHANGES: tuple[tuple[str, Raw | None], ...] = (
    ("of-nobody", None),
    ("of-another-kind", {"kind": "ConfigMap", "apiVersion": "v1"}),
    ("of-no-controller", {"controller": False}),
    ("of-the-job", {}),
)
_LABELS: tuple[tuple[str, Raw], ...] = (
    ("attempt-of-two", {"attempt": "1-1"}),
    ("attempt-in-floats", {"attempt": "1e9"}),
    ("attempt-of-letters", {"attempt": "x"}),
    ("attempt-empty", {"attempt": ""}),
    ("attempt-zero", {"attempt": "0"}),
    ("index-huge", {"index": "9" * 40}),
    ("role-unknown", {"role": "gardener"}),
)
_ANNOTATIONS: tuple[tuple[str, Raw], ...] = (
    ("released-soon", {"disttrain.io/released-at": "soon"}),
    ("reserves-a-node", {"disttrain.io/reserved-node": "fake-0"}),
    ("reserves-all", {"disttrain.io/reserved-node": "fake-1", "disttrain.io/released-at": "2026-01-01T00:00:00Z"}),
)

BEYOND_A_NODE = {"cpu": "100000"}
_AMOUNTS: tuple[Raw, ...] = (
    # Devices are whole numbers.
    *({"cpu": text, "memory": text, "example.com/device": text} for text in ("1e18", "1e30", "1e300", "9" * 300)),
    {"cpu": "1e-300", "memory": "1e-300"},
)
"""What an API server takes as quantities, and no node has."""


def pods(job: Raw) -> Iterator[Poison]:
    """Pods beside a job: with labels, annotations and owners of its pods, and far too large for any node."""
    about = job["metadata"]
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": about["name"], "uid": about["uid"]}
    owner |= {"controller": True}
    labels = {"job-name": about["name"], "job-uid": about["uid"], "role": "worker", "index": "0", "attempt": "1"}
    odd = [(name, change, {}, BEYOND_A_NODE) for name, change in _LABELS]
    odd += [(name, {}, notes, BEYOND_A_NODE) for name, notes in _ANNOTATIONS]
    odd += [(f"of-amounts-{number}", {}, {}, amounts) for number, amounts in enumerate(_AMOUNTS)]
    for number, (name, change, notes, amounts) in enumerate(odd):
        whose, changed = _OWNER_CHANGES[number % len(_OWNER_CHANGES)]
        metadata = {
            "name": f"pod-{name}-{whose}",
            "labels": {"app.kubernetes.io/managed-by": "disttrain"}
            | {f"disttrain.io/{key}": value for key, value in (labels | change).items()},
            "annotations": notes,
            "ownerReferences": [] if changed is None else [owner | changed],
        }
        container = {"name": "trainer", "image": "i:1", "resources": {"requests": amounts, "limits": amounts}}
        spec = {"containers": [container], "schedulingGates": [{"name": "disttrain.io/gang"}]}
        yield Poison(metadata["name"], json.dumps({"metadata": metadata, "spec": spec}))


def neighbours(job: Raw) -> Iterator[tuple[str, Poison]]:
    """Other objects with the labels of a job's children, and the path of their collection below the namespace."""
    about = job["metadata"]
    labels = {"app.kubernetes.io/managed-by": "disttrain", "disttrain.io/job-uid": about["uid"]}
    core, policy, network = "api/v1", "apis/policy/v1", "apis/networking.k8s.io/v1"
    for collection, plural, rest in (
        (core, "services", {"spec": {"clusterIP": "None", "selector": labels}}),
        (core, "secrets", {"stringData": {"job.json": "[" * 5000, "token": ""}}),
        (core, "configmaps", {"data": {"a": "b" * 500_000}}),
        (
            core,
            "persistentvolumeclaims",
            {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}},
        ),
        (policy, "poddisruptionbudgets", {"spec": {"maxUnavailable": 0, "selector": {"matchLabels": labels}}}),
        (network, "networkpolicies", {"spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}),
    ):
        name = f"{plural}-of-nobody"
        body = {"metadata": {"name": name, "labels": labels}} | rest
        yield f"{collection}/{{}}/{plural}", Poison(name, json.dumps(body))
    for kind, rest in (
        ("pods", {"spec": {"containers": [{"name": "trainer", "image": "i:1"}]}}),
        ("services", {"spec": {"ports": [{"port": 1}]}}),
    ):
        name = f"{kind}-1100-deep"
        text = json.dumps({"metadata": {"name": name, "labels": labels}} | rest)
        yield (
            f"{core}/{{}}/{kind}",
            Poison(name, text.replace('"metadata": {', '"metadata": {' + managed_fields(1100) + ",", 1)),
        )
