"""Raw nodes and pods of the API server -> what the gate knows of them. Small: a cluster has many pods."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disttrain_api.names import GANG_GATE, Annotation, Label
from disttrain_operator.gate.fit import PODS, Needs, NodeFacts, Requirement, Taint, Term, Toleration
from disttrain_operator.gate.quantities import add, amounts, largest

Raw = Mapping[str, Any]


@dataclass(frozen=True)
class ClusterPod:
    """A pod of anybody's."""

    uid: str
    requests: tuple[tuple[str, int], ...]
    node: str | None = None
    """Where it runs, or where the gate has sent it."""
    finished: bool = False
    deleting: bool = False
    job: str | None = None
    """Uid of the job that it belongs to."""
    attempt: str = ""
    identity: tuple[str, int] = ("", 0)
    """Role and index in its job."""
    group: int | None = None
    """Its topology group in its job."""
    held: bool = False
    """The gate holds it."""
    others_hold: bool = False
    """A scheduling gate of somebody else holds it."""
    bound: bool = False
    """It has its node, and is not only sent there."""
    needs: Needs | None = None
    """Known while the gate holds it, and until it has its node."""
    priority: int = 0


def cluster_pod(raw: Raw) -> ClusterPod:
    """The facts of a pod. What cannot be read counts as nothing: the API server has let it in."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    gates = {gate.get("name") for gate in spec.get("schedulingGates") or []}
    labels = metadata.get("labels") or {}
    requests = effective_requests(spec)
    held = GANG_GATE in gates
    node = spec.get("nodeName")
    if node is None and not held:
        node = (metadata.get("annotations") or {}).get(Annotation.RESERVED_NODE)
    return ClusterPod(
        uid=metadata["uid"],
        requests=requests,
        node=node,
        finished=status.get("phase") in ("Succeeded", "Failed"),
        deleting="deletionTimestamp" in metadata,
        job=labels.get(Label.JOB_UID),
        attempt=labels.get(Label.ATTEMPT, ""),
        identity=(labels.get(Label.ROLE, ""), _number(labels.get(Label.INDEX)) or 0),
        group=_number(labels.get(Label.TOPOLOGY_GROUP)),
        held=held,
        others_hold=bool(gates - {GANG_GATE}),
        bound=bool(spec.get("nodeName")),
        needs=_needs(spec, requests) if held or (node is not None and not spec.get("nodeName")) else None,
        priority=spec.get("priority") or 0,
    )


def node_facts(raw: Raw) -> NodeFacts:
    """The facts of a node."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or []
    )
    return NodeFacts(
        name=metadata["name"],
        allocatable=amounts(status.get("allocatable")),
        labels=metadata.get("labels") or {},
        taints=tuple(
            Taint(taint["key"], taint.get("effect", ""), taint.get("value") or "") for taint in spec.get("taints") or []
        ),
        unschedulable=bool(spec.get("unschedulable")) or "deletionTimestamp" in metadata,
        ready=ready,
    )


def effective_requests(spec: Raw) -> tuple[tuple[str, int], ...]:
    """What the scheduler counts for a pod.

    The greater of what its containers and sidecars ask for together and what any init container asks for beside the
    sidecars that are up by then; the pod's own `resources` instead, where they name a resource; and the overhead.
    """
    sidecars: dict[str, int] = {}
    highest: dict[str, int] = {}
    for container in spec.get("initContainers") or []:
        requests = _requests(container)
        if container.get("restartPolicy") == "Always":
            sidecars = add(sidecars, requests)
            highest = largest(highest, sidecars)
        else:
            highest = largest(highest, add(sidecars, requests))
    together = add(sidecars, *(_requests(container) for container in spec.get("containers") or []))
    total = {**largest(highest, together), **_requests(spec)}
    total = add(total, amounts(spec.get("overhead")), {PODS: 1})
    return tuple(sorted((resource, value) for resource, value in total.items() if value))


def _requests(holder: Raw) -> dict[str, int]:
    resources = holder.get("resources") or {}
    # The API server fills in requests from limits; a template that it has not seen may lack them.
    return amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _needs(spec: Raw, requests: tuple[tuple[str, int], ...]) -> Needs:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or []
    return Needs(
        requests=requests,
        node_selector=tuple(sorted((spec.get("nodeSelector") or {}).items())),
        terms=None if required is None else tuple(_term(term) for term in required.get("nodeSelectorTerms") or []),
        preferred=tuple((entry.get("weight", 1), _term(entry.get("preference") or {})) for entry in preferred),
        tolerations=tuple(
            Toleration(
                entry.get("key") or "",
                entry.get("operator") or "Equal",
                entry.get("value") or "",
                entry.get("effect") or "",
            )
            for entry in spec.get("tolerations") or []
        ),
    )


def _term(raw: Raw) -> Term:
    return Term(
        labels=tuple(_requirement(entry) for entry in raw.get("matchExpressions") or []),
        fields=tuple(_requirement(entry) for entry in raw.get("matchFields") or []),
    )


def _requirement(raw: Raw) -> Requirement:
    return Requirement(raw["key"], raw["operator"], tuple(raw.get("values") or ()))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
