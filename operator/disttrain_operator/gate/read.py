"""Raw nodes and pods of the API server -> what the gate knows of them. Small: a cluster has many pods.

Anybody may make a pod, so whatever stands in one is read without an error and is bounded. Whether what it says of a job
counts is for the caller to find out, who knows the jobs.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from disttrain_api.names import GANG_GATE, Annotation, Label
from disttrain_api.ownership import controlling_job
from disttrain_operator.gate.fit import PODS, Needs, NodeFacts, Requirement, Taint, Term, Toleration
from disttrain_operator.gate.quantities import add_to, amounts, raise_to, whole_number

Raw = Mapping[str, Any]

# Each is asked of each node for each kind of pod: a megabyte of node affinity would cost everybody's gate seconds.
MAX_CONSTRAINTS = 500
MAX_RESOURCES = 100
MAX_NODE_NAME = 253
_OF_EVERY_NODE = ("cpu", "memory", "ephemeral-storage", PODS)
_UNREADABLE = (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class ClusterPod:
    """A pod of anybody's."""

    uid: str
    requests: tuple[tuple[str, int], ...]
    namespace: str = ""
    node: str | None = None
    """Where it runs."""
    reserved: str | None = None
    """Where the gate has sent it, if it is a pod of a job that waits at the gate. Anybody may write that."""
    finished: bool = False
    deleting: bool = False
    job: str | None = None
    """Uid of the job that controls it, if that is in its namespace."""
    attempt: str = ""
    identity: tuple[str, int] = ("", 0)
    """Role and index in its job."""
    group: int | None = None
    """Its topology group in its job."""
    gated: bool = False
    """The gate holds it."""
    others_hold: bool = False
    """A scheduling gate of somebody else holds it."""
    needs: Needs | None = None
    """Known while the gate holds it, and until it has its node."""
    priority: int = 0
    problem: str = ""
    """Why the gate cannot place it."""


def cluster_pod(raw: Raw, offered: Container[str] = ()) -> ClusterPod:
    """Return the facts of a pod. What cannot be read counts as nothing: the API server has let it in.

    offered: the resources that nodes have.
    """
    try:
        return _cluster_pod(raw, offered)
    except _UNREADABLE as error:
        metadata, spec = raw["metadata"], raw.get("spec") or {}
        return ClusterPod(
            uid=metadata["uid"],
            requests=((PODS, 1),),
            namespace=metadata.get("namespace") or "",
            node=spec.get("nodeName"),
            problem=f"the gate cannot read it ({type(error).__name__}: {str(error)[:200]})",
        )


def _cluster_pod(raw: Raw, offered: Container[str]) -> ClusterPod:
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    gates = {gate.get("name") for gate in spec.get("schedulingGates") or []}
    labels = metadata.get("labels") or {}
    requests = effective_requests(spec)
    gated = GANG_GATE in gates
    node = spec.get("nodeName") or None
    reserved = None
    if node is None and not gated:
        reserved = _node_name((metadata.get("annotations") or {}).get(Annotation.RESERVED_NODE))
    waits = gated or reserved is not None
    constraints = _constraints(spec) + len(requests) if waits else 0
    problem = ""
    if constraints > MAX_CONSTRAINTS:
        problem = (
            f"its node affinity, nodeSelector, tolerations and requests have {constraints:,} entries; the gate reads"
            f" {MAX_CONSTRAINTS} at most"
        )
    return ClusterPod(
        uid=metadata["uid"],
        requests=_that_count(requests, offered),
        namespace=metadata.get("namespace") or "",
        node=node,
        reserved=reserved,
        finished=status.get("phase") in ("Succeeded", "Failed"),
        deleting="deletionTimestamp" in metadata,
        job=controlling_job(metadata),
        attempt=labels.get(Label.ATTEMPT, ""),
        identity=(labels.get(Label.ROLE, ""), _number(labels.get(Label.INDEX)) or 0),
        group=_number(labels.get(Label.TOPOLOGY_GROUP)),
        gated=gated,
        others_hold=bool(gates - {GANG_GATE}),
        needs=_shared(_needs(spec, requests)) if waits and not problem else None,
        priority=whole_number(spec.get("priority")) or 0,
        problem=problem,
    )


def _that_count(requests: tuple[tuple[str, int], ...], offered: Container[str]) -> tuple[tuple[str, int], ...]:
    """Return MAX_RESOURCES of them at most: what nodes have goes ahead of what may be invented."""
    if len(requests) <= MAX_RESOURCES:
        return requests
    ordered = sorted(requests, key=lambda entry: entry[0] not in _OF_EVERY_NODE and entry[0] not in offered)
    return tuple(sorted(ordered[:MAX_RESOURCES]))


_KNOWN: WeakKeyDictionary[Needs, ref[Needs]] = WeakKeyDictionary()
"""For as long as a pod has them."""


def _shared(needs: Needs) -> Needs:
    """Return one object for all pods of a template: less memory, and equal ones are compared at once."""
    known = _KNOWN.get(needs)
    found = known() if known is not None else None
    if found is None:
        _KNOWN[needs] = ref(needs)
        return needs
    return found


def _node_name(text: object) -> str | None:
    """Return the node name in an annotation; None if no node can have this name."""
    return text if isinstance(text, str) and len(text) <= MAX_NODE_NAME else None


def _constraints(spec: Raw) -> int:
    """Return how many lines and values a node has to be compared with."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or []
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or []
    terms = [*required, *(entry.get("preference") or {} for entry in preferred)]
    lines = [line for term in terms for kind in ("matchExpressions", "matchFields") for line in term.get(kind) or []]
    values = sum(len(line.get("values") or ()) for line in lines)
    return len(terms) + len(lines) + values + len(spec.get("nodeSelector") or {}) + len(spec.get("tolerations") or [])


def node_facts(raw: Raw) -> NodeFacts:
    """Return the facts of a node. One that cannot be read takes no pods."""
    try:
        return _node_facts(raw)
    except _UNREADABLE:
        return NodeFacts(raw["metadata"]["name"], {}, ready=False)


def _node_facts(raw: Raw) -> NodeFacts:
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
    """Return what the scheduler counts for a pod.

    The greater of what its containers and sidecars ask for together and what any init container asks for beside the
    sidecars that are up by then; the pod's own `resources` instead, where they name a resource; and the overhead.
    """
    # A pod may have thousands of containers: nothing is copied from one to the next.
    together: dict[str, int] = {}
    highest: dict[str, int] = {}
    for container in spec.get("initContainers") or []:
        requests = _requests(container)
        if container.get("restartPolicy") == "Always":
            add_to(together, requests)
            raise_to(highest, {resource: together[resource] for resource in requests})
        else:
            raise_to(highest, {resource: together.get(resource, 0) + value for resource, value in requests.items()})
    for container in spec.get("containers") or []:
        add_to(together, _requests(container))
    raise_to(together, highest)
    total = {**together, **_requests(spec)}
    add_to(total, amounts(spec.get("overhead")))
    add_to(total, {PODS: 1})
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
        preferred=tuple(
            (whole_number(entry.get("weight", 1)) or 0, _term(entry.get("preference") or {})) for entry in preferred
        ),
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
    number = whole_number(text)
    return number if number is not None and number >= 0 else None
